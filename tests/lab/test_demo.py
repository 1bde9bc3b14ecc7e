"""The runs of the demo are a fair comparison."""

from __future__ import annotations

from collections import Counter

import pytest

from ocnopt.lab import demo
from ocnopt.lab.config import RunConfig
from ocnopt.lab.tables import Key


def configs(epochs: int | None = None) -> list[RunConfig]:
    return demo.configs(demo.DATASETS, range(2), epochs)


def test_no_line_has_more_settings_to_choose_from_than_another_ordinary_one() -> None:
    settings = {(run.data.name, run.label, run.optimizer.lr) for run in configs()}
    counts = Counter((dataset, label) for dataset, label, _ in settings)
    slow = {contender.label for contender in demo.CONTENDERS if contender.slow}
    assert {count for (_, label), count in counts.items() if label not in slow} == {2}
    assert {count for (_, label), count in counts.items() if label in slow} == {1}
    assert slow == {"E-MSA", "DDP"}


def test_learning_rates_are_chosen_on_samples_held_out() -> None:
    assert {run.data.validation for run in configs()} == {demo.VALIDATION}
    assert demo.VALIDATION > 0


def test_all_optimizers_are_in_one_table_for_each_dataset() -> None:
    tasks = {run.data.name: set[tuple[str, ...]]() for run in configs()}
    for run in configs():
        tasks[run.data.name].add(Key.of(run.table()).task)
    assert {name: len(task) for name, task in tasks.items()} == {"WINE": 1, "DIGITS": 1}


@pytest.mark.parametrize("epochs", [1, 4])
def test_fewer_epochs_can_be_had_but_not_more(epochs: int) -> None:
    for short, planned in zip(configs(epochs), configs(), strict=True):
        assert short.training.epochs == min(epochs, planned.training.epochs)

"""The numbers of the report are those of the runs."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest
from tests.lab.report.folders import NAN, of_class, report, summary, text, write_run


def test_mean_and_sample_deviation_over_seeds(tmp_path: Path) -> None:
    accuracies = [0.9, 0.92, 0.97]
    for seed, accuracy in enumerate(accuracies):
        write_run(tmp_path / "runs" / str(seed), seed=seed, accuracy=accuracy, lr=0.03)
    mean, deviation = 100 * statistics.mean(accuracies), 100 * statistics.stdev(accuracies)
    assert summary(report(tmp_path / "runs"))["Adam"] == [f"{mean:.2f} ± {deviation:.2f} %", "0.03", "3", "0 of 3", "2"]


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", accuracy=0.875)
    assert summary(report(tmp_path / "runs"))["Adam"][0] == "87.50 %"


def test_the_learning_rate_with_the_best_mean_is_shown(tmp_path: Path) -> None:
    """0.1 has the best single run, 0.01 the best mean."""
    for lr, accuracies in {0.1: (0.99, 0.5), 0.01: (0.9, 0.88), 0.001: (0.7, 0.6)}.items():
        for seed, accuracy in enumerate(accuracies):
            write_run(tmp_path / "runs" / f"{lr}-{seed}", lr=lr, seed=seed, accuracy=accuracy)
    assert summary(report(tmp_path / "runs"))["Adam"][:4] == ["89.00 ± 1.41 %", "0.01 of 3", "2", "0 of 6"]


def test_a_validation_set_decides_where_there_is_one(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", lr=0.1, accuracy=0.95, validation=0.8)
    write_run(tmp_path / "runs" / "b", lr=0.2, accuracy=0.85, validation=0.9)
    root = report(tmp_path / "runs")
    assert summary(root)["Adam"][:2] == ["85.00 %", "0.2 of 2"]
    assert "best mean validation accuracy" in text(root)
    assert "made on samples held out of the training set" in text(root)


def test_a_choice_by_the_test_set_is_owned_up_to(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", lr=0.1)
    assert "advantage" not in text(report(tmp_path / "runs"))
    write_run(tmp_path / "runs" / "b", lr=0.2)
    assert "whoever tried more settings has an advantage" in text(report(tmp_path / "runs"))


def test_who_had_fewer_epochs_is_in_the_same_table_and_says_so(tmp_path: Path) -> None:
    for label, epochs, accuracy in (("Adam", 20, 0.8), ("SGDm", 20, 0.7), ("DDP", 1, 0.9), ("E-MSA", 3, 0.6)):
        write_run(tmp_path / "runs" / label, label=label, epochs=epochs, accuracy=accuracy)
    root = report(tmp_path / "runs")
    heads = ["DDP1 epoch instead of 20", "Adam", "SGDm", "E-MSA3 epochs instead of 20"]
    assert list(summary(root)) == ["Optimizer", "DIGITS · fcn", *heads]
    assert [text(strong) for strong in of_class(root, "summary")[0].iter("strong")] == ["90.00 %"]
    assert "1 task" in text(root)


def test_one_method_with_two_lengths_is_two_lines(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", accuracy=0.8)
    write_run(tmp_path / "runs" / "b", accuracy=0.8, seed=1)
    write_run(tmp_path / "runs" / "c", accuracy=0.9, epochs=40)
    rows = summary(report(tmp_path / "runs"))
    assert rows["Adam, 20 epochs"][0] == "80.00 ± 0.00 %"
    assert rows["Adam, 40 epochs40 epochs instead of 20"][0] == "90.00 %"


def test_a_part_of_the_data_is_said_where_the_results_are(tmp_path: Path) -> None:
    note = "6,000 train, 1,000 test instead of the 50,000 train, 10,000 test of the published set."
    part = {"train": 6000, "validation": 0, "test": 1000, "subset": True, "notes": [note], "source": "here"}
    whole = {**part, "train": 50000, "test": 10000, "subset": False, "notes": ["A remark."]}
    for i, data in enumerate((part, part, whole)):
        write_run(tmp_path / "runs" / f"{i}", seed=i, environment={"torch": "2", "data": data})
    write_run(tmp_path / "runs" / "waiting", seed=9, losses=[], finished=False, environment={"threads": 1})
    root = report(tmp_path / "runs")
    some, all_of_it = "6,000 train, 1,000 test", "50,000 train, 10,000 test"
    first, second = (head for head in summary(root) if head.startswith("DIGITS"))
    assert first == f"DIGITS · fcn (samples = {some}){some} samples{note}"
    assert second == f"DIGITS · fcn (samples = {all_of_it}){all_of_it} samples"
    assert f"{some} samples. {note}" in [text(paragraph) for paragraph in root.iter("p")]
    assert "2 tasks" in text(root)  # what has not begun belongs to one of them


def test_the_best_method_comes_first_and_is_bold(tmp_path: Path) -> None:
    for label, accuracy in {"Adam": 0.8, "OCNOpt": 0.95, "SGDm": 0.9}.items():
        write_run(tmp_path / "runs" / label, label=label, accuracy=accuracy)
    root = report(tmp_path / "runs")
    assert list(summary(root))[2:] == ["OCNOpt", "SGDm", "Adam"]
    assert [text(strong) for strong in of_class(root, "summary")[0].iter("strong")] == ["95.00 %"]


def test_a_diverged_run_is_counted_and_not_forgotten(tmp_path: Path) -> None:
    """Leaving it out would make 0.5 the best learning rate."""
    write_run(tmp_path / "runs" / "a", lr=0.5, seed=0, accuracy=0.99)
    write_run(tmp_path / "runs" / "b", lr=0.5, seed=1, accuracy=None, losses=[2.0, 9.0, NAN, NAN], diverged=True)
    write_run(tmp_path / "runs" / "c", lr=0.1, seed=0, accuracy=0.9)
    write_run(tmp_path / "runs" / "d", lr=0.1, seed=1, accuracy=0.91)
    root = report(tmp_path / "runs")
    assert summary(root)["Adam"][:4] == ["90.50 ± 0.71 %", "0.1 of 2", "2", "1 of 4"]
    (numbers,) = (table for table in root.iter("table") if "1 of 2 diverged" in text(table))
    assert "49.50 ± 70.00 %" in text(numbers)


def test_an_unfinished_run_is_named_but_does_not_count(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", seed=0, accuracy=0.9)
    write_run(tmp_path / "runs" / "b", seed=1, accuracy=0.1, finished=False)
    assert summary(report(tmp_path / "runs"))["Adam"][:3] == ["90.00 %", "0.1", "11 unfinished"]


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", losses=[], finished=False)
    root = report(tmp_path / "runs")
    assert summary(root)["Adam"] == ["–", "0.1", "01 unfinished", "0 of 1", "–"]
    assert not of_class(root, "chart")


def test_without_accuracies_the_test_loss_decides(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", lr=0.1, accuracy=None, losses=[2.0, 0.2, 1.5, 1.0])
    write_run(tmp_path / "runs" / "b", lr=0.2, accuracy=None, losses=[2.0, 1.0, 0.7, 0.5])
    root = report(tmp_path / "runs")
    assert summary(root)["Adam"][:2] == ["0.55", "0.2 of 2"]
    assert "lower is better" in text(root)


def test_time_per_step_is_a_median_over_steps_and_runs(tmp_path: Path) -> None:
    for seed, seconds in enumerate((0.001, 0.004, 0.1)):
        write_run(tmp_path / "runs" / str(seed), seed=seed, step_seconds=seconds)
    assert summary(report(tmp_path / "runs"))["Adam"][-1] == "4"


def test_settings_that_differ_make_different_tasks(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", data={"batch_size": 16}, accuracy=0.7)
    write_run(tmp_path / "runs" / "b", data={"batch_size": 64}, accuracy=0.8)
    write_run(tmp_path / "runs" / "c", data={"batch_size": 64}, accuracy=0.9, seed=1)
    tasks = [text(heading) for heading in report(tmp_path / "runs").iter("h2")]
    assert tasks[1:3] == ["DIGITS · fcn (batch_size = 16)", "DIGITS · fcn (batch_size = 64)"]


def test_other_options_are_searched_like_the_learning_rate(tmp_path: Path) -> None:
    accuracies = {(0.1, 0.0): 0.8, (0.1, 0.01): 0.95, (0.3, 0.0): 0.85, (0.3, 0.01): 0.9}
    for (lr, decay), accuracy in accuracies.items():
        write_run(tmp_path / "runs" / f"{lr}-{decay}", lr=lr, accuracy=accuracy, options={"weight_decay": decay})
    root = report(tmp_path / "runs")
    assert summary(root)["Adamweight_decay = 0.01"][:2] == ["95.00 %", "0.1 of 4"]
    (numbers,) = (table for table in root.iter("table") if "0.3" in text(next(table.iter("thead"))))
    assert text(next(numbers.iter("tbody"))) == "Adam95.00 %90.00 %"


def test_layers_show_their_last_values(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", label="OCNOpt", layers=True)
    (table,) = of_class(report(tmp_path / "runs"), "layers")
    heads = [text(cell) for cell in table.iter("th") if cell.get("scope") == "col"]
    assert [head.split("how")[0].split("weights")[0].split("change")[0] for head in heads] == [
        "Layer",
        "trace K",
        "w",
        "s",
        "clamped",
    ]
    rows = {text(next(iter(row))): [text(last) for last in of_class(row, "last")] for row in table.iter("tr")}
    assert rows["encoder.2"] == ["0.001", "0.3 … 0.7", "0.0654", "4"]
    assert "no eigenvalue was cut" in text(table)


def test_how_it_was_run(tmp_path: Path) -> None:
    for seed, (torch, threads) in enumerate(itertools.product(("2.12.0", "2.13.0"), (16, 2))):
        environment = {"torch": torch, "threads": threads, "command": "ocnopt compare --seeds 4"}
        write_run(tmp_path / "runs" / str(seed), seed=seed, environment=environment)
    root = report(tmp_path / "runs")
    assert [text(pre) for pre in root.iter("pre")] == ["ocnopt compare --seeds 4"]
    rows = [text(row) for table in of_class(root, "settings") for row in table.iter("tr")]
    assert {"torch2.12.0, 2.13.0", "threads2, 16", "training.seed0, 1, 2, 3", "optimizer.lr0.1"} <= set(rows)


@pytest.mark.parametrize("command", [["ocnopt", "train", "a b.toml"], "ocnopt train 'a b.toml'"])
def test_the_command_can_be_pasted(tmp_path: Path, command: object) -> None:
    write_run(tmp_path / "runs" / "a", environment={"command": command})
    assert [text(pre) for pre in report(tmp_path / "runs").iter("pre")] == ["ocnopt train 'a b.toml'"]

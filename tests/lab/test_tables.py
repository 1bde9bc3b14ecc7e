"""The table of the terminal: one for each task, with all optimizers, the chosen learning rates and the best line."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from ocnopt.lab.runs import Record
from ocnopt.lab.tables import Key, Row, chosen, draw, make_row


def row(
    label: str, lr: float, test: float, validation: float | None = None, epochs: int = 10, notes: tuple[str, ...] = ()
) -> Row:
    config: dict[str, Any] = {
        "label": label,
        "data": {"name": "WINE", "batch_size": 8},
        "network": {"name": "fcn"},
        "optimizer": {"lr": lr},
        "training": {"epochs": epochs, "seed": 0},
    }
    end: Record = {"test_accuracy": test, "validation_accuracy": validation, "train_loss": 1.0, "seconds": 1.0}
    return make_row(Key.of(config, notes), 2, [{**end, "diverged": False}] * 2)


def shown(*rows: Row) -> list[str]:
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="standard", record=True)
    console.print(draw(rows))
    return [line.rstrip() for line in console.export_text(styles=True).splitlines() if line.strip()]


def bold(lines: list[str]) -> list[str]:
    return [line for line in lines if line.strip().startswith("\x1b[1m") and "±" in line]


def test_the_validation_accuracy_chooses_and_the_test_accuracy_decides() -> None:
    """SGDm's other rate has the best test accuracy of all, and does not count."""
    rows = [
        row("Adam", 0.1, test=0.9, validation=0.8),
        row("Adam", 1.0, test=0.7, validation=0.6),
        row("SGDm", 0.1, test=0.95, validation=0.7),
        row("SGDm", 1.0, test=0.85, validation=0.8),
        row("Muon", 0.1, test=0.6, validation=0.99),
    ]
    assert chosen(rows) == {rows[0].key, rows[3].key}
    lines = shown(*rows)
    assert [("*" in line) for line in lines if "±" in line] == [True, False, False, True, False]
    (best,) = bold(lines)
    assert "Adam" in best
    assert lines[-1] == "* the best validation accuracy of this optimizer; shown is the test accuracy"


def test_without_a_validation_set_nothing_is_chosen() -> None:
    rows = [row("Adam", 0.1, test=0.9), row("Adam", 1.0, test=0.95)]
    assert chosen(rows) == set()
    (best,) = bold(shown(*rows))
    assert "95.00" in best


def test_equal_rates_give_the_smaller_one() -> None:
    rows = [row("Adam", 1.0, test=0.9, validation=0.8), row("Adam", 0.1, test=0.9, validation=0.8)]
    assert chosen(rows) == {rows[1].key}


def test_all_optimizers_of_a_task_are_in_one_table() -> None:
    lines = shown(row("OCNOpt", 0.1, test=0.9), row("E-MSA", 1.0, test=0.8, epochs=3), row("DDP", 1.0, 0.95, epochs=1))
    assert sum("batch size" in line for line in lines) == 1
    assert sum("E-MSA (3 epochs)" in line or "DDP (1 epoch)" in line for line in lines) == 2
    assert len(bold(lines)) == 1


def test_what_was_left_out_of_the_data_is_below_the_table() -> None:
    lines = shown(row("Adam", 0.1, test=0.9, notes=("Only a part.",)), row("Adam", 0.1, test=0.9))
    assert sum("batch size" in line for line in lines) == 2  # what does not compare is not in one table
    assert lines.count("Only a part.") == 1

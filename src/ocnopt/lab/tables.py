"""Runs that differ in their seeds only, as one line of a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ocnopt.lab import toml
from ocnopt.lab.runs import Record, RunFolder


@dataclass(frozen=True)
class Key:
    """What the runs of a line have in common: everything but the seed."""

    dataset: str
    network: str
    batch_size: int
    epochs: int
    label: str
    lr: float
    notes: tuple[str, ...] = ()  #: what was left out of the data; empty where nothing was
    rest: str = field(default="", repr=False)

    @classmethod
    def of(cls, config: dict[str, Any], notes: Iterable[str] = ()) -> Key:
        data, training = config["data"], config["training"]
        return cls(
            data["name"],
            config["network"]["name"],
            data["batch_size"],
            training["epochs"],
            config["label"],
            float(config["optimizer"]["lr"]),
            tuple(notes),
            rest=toml.dumps({**config, "training": {**training, "seed": None}}),
        )

    @property
    def task(self) -> tuple[str, ...]:
        """What the lines of a table have in common. Some optimizers may have had fewer epochs than others."""
        return f"{self.dataset}, {self.network}, batch size {self.batch_size}", *self.notes


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation; the latter is ``None`` for a single value."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """``None`` where a value is missing or was not finite: a mean over the others would flatter."""
        numbers = list(values)
        known = [number for number in numbers if number is not None]
        if not known or len(known) < len(numbers):
            return None
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)

    def show(self, digits: int, scale: float = 1.0) -> str:
        mean = f"{self.mean * scale:.{digits}f}"
        return mean if self.deviation is None else f"{mean} ± {self.deviation * scale:.{digits}f}"


@dataclass(frozen=True)
class Row:
    """One line: over ``finished`` of ``runs`` runs."""

    key: Key
    runs: int
    finished: int
    diverged: int
    test_accuracy: Spread | None
    validation_accuracy: Spread | None
    train_loss: Spread | None
    seconds: Spread | None
    test_loss: Spread | None = None
    validation_loss: Spread | None = None

    @property
    def score(self) -> float:
        """By what lines are compared, more is better: the accuracy or, where there is none, minus the loss."""
        return -_mean(self.test_loss, math.inf) if self.test_accuracy is None else self.test_accuracy.mean

    @property
    def validation_score(self) -> float:
        spread = self.validation_accuracy
        return -_mean(self.validation_loss, math.inf) if spread is None else spread.mean

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        key = row.pop("key")
        del key["rest"]
        return {**key, **row}


def make_row(key: Key, runs: int, finals: list[Record]) -> Row:
    """From the ``final`` records, with what was found on the validation samples where there were some."""

    def spread(name: str) -> Spread | None:
        return Spread.of(final.get(name) for final in finals)

    diverged = sum(bool(final["diverged"]) for final in finals)
    accuracies = spread("test_accuracy"), spread("validation_accuracy")
    losses = spread("test_loss"), spread("validation_loss")
    return Row(key, runs, len(finals), diverged, *accuracies, spread("train_loss"), spread("seconds"), *losses)


def summarise(folders: Iterable[RunFolder]) -> list[Row]:
    """One row for all runs that differ in their seeds only, in the order of the first."""
    finals: dict[Key, list[Record | None]] = {}
    for folder in folders:
        finals.setdefault(Key.of(folder.config(), data_notes(folder)), []).append(_final(folder))
    return [make_row(key, len(each), [f for f in each if f is not None]) for key, each in finals.items()]


def data_notes(folder: RunFolder) -> list[str]:
    """What a reader of the results must know of the data of a run, where it was not the whole of it."""
    data = folder.environment().get("data", {})
    return list(data["notes"]) if data.get("subset") else []


def _final(folder: RunFolder) -> Record | None:
    final, epochs = folder.final(), folder.metrics("epoch")
    return None if final is None else with_validation(final, epochs[-1] if epochs else {})


def with_validation(final: Record, last_epoch: Record) -> Record:
    return {**final, **{key: last_epoch.get(key) for key in ("validation_accuracy", "validation_loss")}}


def chosen(rows: Sequence[Row]) -> set[Key]:
    """Of the lines of one optimizer on one task the one with the best validation, where that is known."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.key.task, row.key.label, row.key.epochs), []).append(row)
    searched = [
        group for group in groups.values() if len(group) > 1 and any(row.validation_score > -math.inf for row in group)
    ]
    return {max(group, key=lambda row: (row.validation_score, -row.key.lr)).key for group in searched}


def _mean(spread: Spread | None, otherwise: float) -> float:
    return otherwise if spread is None else spread.mean


def draw(rows: Iterable[Row]) -> RenderableType:
    """Tables for the terminal, one for each dataset and network, the best line in bold; they fit into 80 columns."""
    tasks: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        tasks.setdefault(row.key.task, []).append(row)
    return Group(*(part for task, members in tasks.items() for part in _draw_task(task, members)))


def _draw_task(task: tuple[str, ...], rows: Sequence[Row]) -> list[RenderableType]:
    heading, *notes = task
    epochs = max(row.key.epochs for row in rows)
    table = Table(title=f"{heading}, epochs: {epochs}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("optimizer")
    by_loss = all(row.test_accuracy is None for row in rows) and any(row.test_loss is not None for row in rows)
    for title in ("lr", "test loss" if by_loss else "accuracy %", "train loss", "seconds", "runs"):
        table.add_column(title, justify="right", no_wrap=True)
    marked = chosen(rows)
    searched = {(key.label, key.epochs) for key in marked}
    competing = [row for row in rows if row.key in marked or (row.key.label, row.key.epochs) not in searched]
    best = max(row.score for row in competing)
    for row in rows:
        leads = row in competing and row.score == best > -math.inf
        table.add_row(*_cells(row, epochs, by_loss, chosen=row.key in marked), style="bold" if leads else None)
    if marked:
        what = "loss" if by_loss else "accuracy"
        notes = [f"* the best validation {what} of this optimizer; shown is the test {what}", *notes]
    return [table, *(Text(note) for note in notes)]


def _cells(row: Row, epochs: int, by_loss: bool, *, chosen: bool) -> list[str]:
    score = row.test_accuracy.show(2, scale=100) if row.test_accuracy else "–"
    if by_loss:
        score = row.test_loss.show(3) if row.test_loss else "–"
    loss = row.train_loss.show(3) if row.train_loss else "–"
    if row.diverged:
        loss = "diverged" if row.diverged == row.finished else f"{row.diverged} of {row.finished} diverged"
    seconds = f"{row.seconds.mean:.1f}" if row.seconds else "–"
    runs = f"{row.finished}" if row.finished == row.runs else f"{row.finished} of {row.runs}"
    label = row.key.label if row.key.epochs == epochs else f"{row.key.label} ({_epochs(row.key.epochs)})"
    return [escape(label), f"{row.key.lr:g}{' *' if chosen else ''}", score, loss, seconds, runs]


def _epochs(count: int) -> str:
    return "1 epoch" if count == 1 else f"{count} epochs"

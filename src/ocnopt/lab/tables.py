"""Runs that differ in their seeds only, as one line of a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

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
    rest: str = field(repr=False)

    @classmethod
    def of(cls, config: dict[str, Any]) -> Key:
        data, training = config["data"], config["training"]
        return cls(
            data["name"],
            config["network"]["name"],
            data["batch_size"],
            training["epochs"],
            config["label"],
            float(config["optimizer"]["lr"]),
            rest=toml.dumps({**config, "training": {**training, "seed": None}}),
        )

    @property
    def heading(self) -> str:
        return f"{self.dataset}, {self.network}, batch size {self.batch_size}, epochs: {self.epochs}"


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
    train_loss: Spread | None
    seconds: Spread | None

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        key = row.pop("key")
        del key["rest"]
        return {**key, **row}


def make_row(key: Key, runs: int, finals: list[Record]) -> Row:
    def spread(name: str) -> Spread | None:
        return Spread.of(final[name] for final in finals)

    diverged = sum(bool(final["diverged"]) for final in finals)
    return Row(key, runs, len(finals), diverged, spread("test_accuracy"), spread("train_loss"), spread("seconds"))


def summarise(folders: Iterable[RunFolder]) -> list[Row]:
    """One row for all runs that differ in their seeds only, in the order of the first."""
    finals: dict[Key, list[Record | None]] = {}
    for folder in folders:
        finals.setdefault(Key.of(folder.config()), []).append(folder.final())
    return [make_row(key, len(each), [f for f in each if f is not None]) for key, each in finals.items()]


def draw(rows: Iterable[Row]) -> RenderableType:
    """Tables for the terminal, one for each dataset, network and length; they fit into 80 columns."""
    tables: dict[str, Table] = {}
    for row in rows:
        heading = row.key.heading
        if heading not in tables:
            tables[heading] = _empty_table(heading)
        tables[heading].add_row(*_cells(row))
    return Group(*tables.values())


def _empty_table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("optimizer")
    for heading in ("lr", "accuracy %", "train loss", "seconds", "runs"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _cells(row: Row) -> list[str]:
    accuracy = row.test_accuracy.show(2, scale=100) if row.test_accuracy else "–"
    loss = row.train_loss.show(3) if row.train_loss else "–"
    if row.diverged:
        loss = "diverged" if row.diverged == row.finished else f"{row.diverged} of {row.finished} diverged"
    seconds = f"{row.seconds.mean:.1f}" if row.seconds else "–"
    runs = f"{row.finished}" if row.finished == row.runs else f"{row.finished} of {row.runs}"
    return [escape(row.key.label), f"{row.key.lr:g}", accuracy, loss, seconds, runs]

"""A run as the report needs it: what was asked for, and what was measured, in order of the steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from ocnopt.lab.runs import RunFolder

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    """The loss of one step."""

    step: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Evaluation:
    """The end of one epoch."""

    step: int
    seconds: float
    train_loss: float
    test_loss: float
    accuracy: float
    validation_loss: float
    validation_accuracy: float


Stepped = TypeVar("Stepped", Point, Evaluation)


@dataclass(frozen=True)
class LayerState:
    """One layer in one step; the names are those of :class:`ocnopt.diagnostics.LayerReport`."""

    trace: float
    w_min: float
    w_max: float
    s: float
    clamped: float
    projections: float


@dataclass(frozen=True)
class Final:
    """The end of the run."""

    accuracy: float
    train_loss: float
    seconds: float
    diverged: bool


@dataclass(frozen=True, eq=False)
class Run:
    """One run folder; equal to itself alone."""

    name: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    points: tuple[Point, ...]
    evaluations: tuple[Evaluation, ...]
    layers: tuple[tuple[int, Mapping[str, LayerState]], ...]  # (step, state of each layer)
    final: Final | None

    @property
    def dataset(self) -> str:
        return self._setting("data", "name")

    @property
    def network(self) -> str:
        return self._setting("network", "name")

    @property
    def optimizer(self) -> str:
        return self._setting("optimizer", "name")

    @property
    def label(self) -> str:
        """The line of a table that the run belongs to."""
        return str(self.config.get("label") or self.optimizer)

    @property
    def lr(self) -> float:
        """NaN where the configuration names none."""
        return _number(self._table("optimizer").get("lr"))

    @property
    def seed(self) -> str:
        return self._setting("training", "seed")

    def _table(self, name: str) -> Mapping[str, Any]:
        table = self.config.get(name)
        return table if isinstance(table, Mapping) else {}

    def _setting(self, table: str, key: str) -> str:
        return str(self._table(table).get(key, "unknown"))

    @property
    def epochs(self) -> str:
        return self._setting("training", "epochs")

    @property
    def samples(self) -> str | None:
        """``142 train, 36 test``; ``None`` for a run that has not begun."""
        data = self._data
        parts = [f"{data[part]:,} {part}" for part in ("train", "validation", "test") if data.get(part)]
        return ", ".join(parts) or None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out of the published data."""
        return tuple(map(str, self._data["notes"])) if self._data.get("subset") else ()

    @property
    def _data(self) -> Mapping[str, Any]:
        data = self.environment.get("data")
        return data if isinstance(data, Mapping) else {}

    @property
    def finished(self) -> bool:
        return self.final is not None

    @property
    def diverged(self) -> bool:
        if self.final is not None:
            return self.final.diverged
        return bool(self.points) and not math.isfinite(self.points[-1].loss)

    @property
    def status(self) -> str:
        return "diverged" if self.diverged else "finished" if self.finished else "unfinished"

    @property
    def accuracy(self) -> float:
        """At the end; a run that did not measure it there ends with its last epoch."""
        if self.final is not None and math.isfinite(self.final.accuracy):
            return self.final.accuracy
        return self.evaluations[-1].accuracy if self.evaluations else math.nan

    @property
    def test_loss(self) -> float:
        return self.evaluations[-1].test_loss if self.evaluations else math.nan

    @property
    def validation_loss(self) -> float:
        return self.evaluations[-1].validation_loss if self.evaluations else math.nan

    @property
    def validation_accuracy(self) -> float:
        return self.evaluations[-1].validation_accuracy if self.evaluations else math.nan

    @property
    def train_loss(self) -> float:
        if self.final is not None and not math.isnan(self.final.train_loss):
            return self.final.train_loss
        return self.evaluations[-1].train_loss if self.evaluations else math.nan

    @property
    def steps(self) -> int:
        ends = [point.step for point in self.points[-1:]] + [end.step for end in self.evaluations[-1:]]
        return max(ends, default=0)

    @property
    def seconds(self) -> float:
        ends = [point.seconds for point in self.points[-1:]] + [end.seconds for end in self.evaluations[-1:]]
        if self.final is not None:
            ends.append(self.final.seconds)
        return max((end for end in ends if math.isfinite(end)), default=math.nan)

    @cached_property
    def seconds_per_step(self) -> float:
        """The median over the steps: evaluations and pauses between two of them do not count."""
        pairs = zip(self.points, self.points[1:], strict=False)
        lengths = [(b.seconds - a.seconds) / (b.step - a.step) for a, b in pairs if b.step > a.step]
        if any(map(math.isfinite, lengths)):
            return median(lengths)
        return self.seconds / self.steps if self.steps else math.nan


def median(values: Iterable[float]) -> float:
    """Of the finite ones; NaN where there is none."""
    finite = sorted(filter(math.isfinite, values))
    middle = len(finite) // 2
    return (finite[middle] + finite[~middle]) / 2 if finite else math.nan


def load(folder: RunFolder) -> Run:
    """Read one run folder.

    Raises:
        RunError: the folder holds no run.
    """
    records = folder.metrics()
    finals = _of_kind(records, "final")
    return Run(
        name=folder.name,
        config=folder.config(),
        environment=folder.environment(),
        points=_by_step(_point(r) for r in _of_kind(records, "step")),
        evaluations=_by_step(_evaluation(r) for r in _of_kind(records, "epoch")),
        layers=tuple(sorted(((_step(r), _states(r)) for r in _of_kind(records, "layers")), key=lambda pair: pair[0])),
        final=_final(finals[-1]) if finals else None,
    )


def _of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    return [record for record in records if record.get("kind") == kind]


def _by_step(records: Iterable[Stepped]) -> tuple[Stepped, ...]:
    return tuple(sorted(records, key=lambda record: record.step))


def _step(record: Record) -> int:
    return int(record["step"])


def _point(record: Record) -> Point:
    return Point(_step(record), _number(record.get("seconds")), _number(record.get("loss")))


def _evaluation(record: Record) -> Evaluation:
    keys = ("seconds", "train_loss", "test_loss", "test_accuracy", "validation_loss", "validation_accuracy")
    return Evaluation(_step(record), *(_number(record.get(key)) for key in keys))


def _states(record: Record) -> Mapping[str, LayerState]:
    keys = ("trace", "w_min", "w_max", "s", "clamped", "projections")
    return {str(row.get("name")): LayerState(*(_number(row.get(key)) for key in keys)) for row in record["layers"]}


def _final(record: Record) -> Final:
    accuracy, train_loss, seconds = (_number(record.get(key)) for key in ("test_accuracy", "train_loss", "seconds"))
    return Final(accuracy, train_loss, seconds, bool(record.get("diverged", False)))


def _number(value: object) -> float:
    """``null`` is how a run writes what is not finite, and a key may be missing: both are NaN here."""
    return float(value) if isinstance(value, (int, float)) else math.nan

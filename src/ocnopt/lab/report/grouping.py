"""Which runs belong together: tasks (what was learned), methods (how), their settings, seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from ocnopt.lab.report.reading import Run, median
from ocnopt.lab.report.settings import Settings, differing, distinguish, flatten, listed

Measure = Literal["accuracy", "test_loss", "train_loss", "validation_accuracy", "validation_loss"]
HIGHER_IS_BETTER: frozenset[Measure] = frozenset({"accuracy", "validation_accuracy"})

#: Runs of one task may differ in these. Who takes long for a step may have had fewer epochs: the table says so.
FREE = frozenset({"label", "training.seed", "training.epochs", "training.log_every", "training.checkpoint_every"})

Key = TypeVar("Key")
TaskKey = tuple[str, Settings]


@dataclass(frozen=True)
class Statistic:
    """Mean and sample deviation over runs; the deviation of one run is NaN."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        if len(self.values) < 2 or not all(map(math.isfinite, self.values)):
            return math.nan
        mean = self.mean
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values) / (len(self.values) - 1))


def score(run: Run, measure: Measure) -> float:
    """A run that diverged and has nothing to show counts as the worst there is, never as absent."""
    value: float = getattr(run, measure)
    if run.diverged and not math.isfinite(value):
        return 0.0 if measure in HIGHER_IS_BETTER else math.inf
    return value


@dataclass(frozen=True)
class Cell:
    """The runs of one method on one task with the same settings: they differ in their seeds."""

    settings: Settings
    runs: tuple[Run, ...]
    measure: Measure  # what is shown
    criterion: Measure  # what the learning rate is chosen by

    @property
    def lr(self) -> float:
        return self.runs[0].lr

    @cached_property
    def score(self) -> Statistic:
        return self._statistic(self.measure)

    def _statistic(self, measure: Measure) -> Statistic:
        """Over the runs that ended."""
        scores = [score(run, measure) for run in self.runs if run.finished or run.diverged]
        return Statistic(tuple(value for value in scores if not math.isnan(value)))

    @cached_property
    def order(self) -> tuple[float, float]:
        """Larger is better; of two equal ones the smaller learning rate."""
        mean = self._statistic(self.criterion).mean
        merit = mean if self.criterion in HIGHER_IS_BETTER else -mean
        return (-math.inf if math.isnan(mean) else merit, 0.0 if math.isnan(self.lr) else -self.lr)

    @property
    def seeds(self) -> int:
        return len({run.seed for run in self.runs if run.finished or run.diverged})

    @property
    def diverged(self) -> int:
        return sum(run.diverged for run in self.runs)

    @property
    def unfinished(self) -> int:
        return sum(run.status == "unfinished" for run in self.runs)

    @property
    def seconds_per_step(self) -> float:
        return median(run.seconds_per_step for run in self.runs)


@dataclass(frozen=True)
class Method:
    """One line of the table: an optimizer, its learning rate (and what else a search varies) left open."""

    index: int  # among all methods of the report: decides colour and dash
    label: str


@dataclass(frozen=True)
class Entry:
    """A method on a task."""

    method: Method
    cells: tuple[Cell, ...]

    @property
    def epochs(self) -> str:
        return self.cells[0].runs[0].epochs

    @cached_property
    def best(self) -> Cell:
        return max(self.cells, key=lambda cell: cell.order)

    @cached_property
    def by_rate(self) -> dict[float, Cell]:
        """For each learning rate the best of the other settings, in order."""
        rates = sorted({cell.lr for cell in self.cells if not math.isnan(cell.lr)})
        return {lr: max((c for c in self.cells if c.lr == lr), key=lambda cell: cell.order) for lr in rates}

    @property
    def choice(self) -> str:
        """What the best cell has besides its learning rate, where cells differ in more than that."""
        keys = [key for key in differing([cell.settings for cell in self.cells]) if key != "optimizer.lr"]
        return listed(self.best.settings, keys)

    def merit(self) -> float:
        """What the rows of the table are sorted by."""
        mean = self.best.score.mean
        if math.isnan(mean):
            return -math.inf
        return mean if self.best.measure in HIGHER_IS_BETTER else -mean

    @property
    def diverged(self) -> int:
        return sum(cell.diverged for cell in self.cells)

    @property
    def total(self) -> int:
        return sum(len(cell.runs) for cell in self.cells)


@dataclass(frozen=True)
class Task:
    """A dataset and a network, with everything else that must be equal for a comparison."""

    label: str
    measure: Measure
    criterion: Measure
    entries: tuple[Entry, ...]  # best first

    @cached_property
    def runs(self) -> list[Run]:
        return [run for entry in self.entries for cell in entry.cells for run in cell.runs]

    @property
    def epochs(self) -> str:
        """Those of most runs."""
        return Counter(run.epochs for run in self.runs).most_common(1)[0][0]

    @property
    def samples(self) -> str | None:
        return next((run.samples for run in self.runs if run.samples), None)

    @property
    def notes(self) -> tuple[str, ...]:
        return next((run.notes for run in self.runs if run.notes), ())

    @property
    def rates(self) -> list[float]:
        return sorted({lr for entry in self.entries for lr in entry.by_rate})


def group_runs(runs: Sequence[Run]) -> list[Task]:
    """Tasks in the order in which the runs name them, in each the best method first."""
    # OCNOpt, which the page is about, gets the first colours.
    ordered = sorted(runs, key=lambda run: run.optimizer != "ocnopt")
    tasks = _tasks(runs)
    names = _method_names(tasks.values())
    methods = {name: Method(i, name) for i, name in enumerate(dict.fromkeys(names[run] for run in ordered))}
    return [
        _task(label, _grouped(members, lambda run: methods[names[run]]))
        for label, members in zip(distinguish([*tasks]), tasks.values(), strict=True)
    ]


def _tasks(runs: Sequence[Run]) -> dict[TaskKey, list[Run]]:
    """Runs on different samples do not compare. One that has not begun belongs to those that it was made with."""
    tasks: dict[TaskKey, list[Run]] = {}
    for (name, settings), members in _grouped(runs, _task_key).items():
        by_samples = _grouped(members, lambda run: run.samples)
        waiting = by_samples.pop(None, [])
        if waiting:
            by_samples.setdefault(next(iter(by_samples), None), []).extend(waiting)
        for samples, same in by_samples.items():
            tasks[name, (*settings, ("data.samples", samples or "unknown"))] = same
    return tasks


def _method_names(tasks: Iterable[Sequence[Run]]) -> dict[Run, str]:
    """The label, and the number of epochs where a task has the same label with several."""
    names = {}
    for runs in tasks:
        lengths = {label: {run.epochs for run in same} for label, same in _grouped(runs, lambda run: run.label).items()}
        for run in runs:
            names[run] = run.label if len(lengths[run.label]) == 1 else f"{run.label}, {run.epochs} epochs"
    return names


def _task(label: str, by_method: Mapping[Method, Sequence[Run]]) -> Task:
    runs = [run for members in by_method.values() for run in members]
    measure = _measure(runs)
    criterion = _criterion(runs, measure)
    entries = []
    for method, members in by_method.items():
        cells = [Cell(key, tuple(same), measure, criterion) for key, same in _grouped(members, _cell_key).items()]
        entries.append(Entry(method, tuple(cells)))
    return Task(label, measure, criterion, tuple(sorted(entries, key=Entry.merit, reverse=True)))


def _measure(runs: Sequence[Run]) -> Measure:
    """Accuracy where anybody measured one, otherwise a loss."""
    choices: tuple[Measure, ...] = ("accuracy", "test_loss", "train_loss")
    return next((name for name in choices if any(not math.isnan(getattr(run, name)) for run in runs)), "accuracy")


def _criterion(runs: Sequence[Run], measure: Measure) -> Measure:
    """Choosing by the test set flatters whoever tried more: a validation set decides where all runs have one."""
    by_validation: Measure = "validation_accuracy" if measure == "accuracy" else "validation_loss"
    ended = [run for run in runs if run.finished and not run.diverged]
    return by_validation if ended and all(math.isfinite(getattr(run, by_validation)) for run in ended) else measure


def _task_key(run: Run) -> TaskKey:
    settings = [(k, v) for k, v in flatten(run.config) if k not in FREE and not k.startswith("optimizer.")]
    return f"{run.dataset} · {run.network}", tuple(sorted(settings))


def _cell_key(run: Run) -> Settings:
    return tuple(sorted((k, v) for k, v in flatten(run.config) if k.startswith("optimizer.")))


def _grouped(runs: Sequence[Run], key: Callable[[Run], Key]) -> dict[Key, list[Run]]:
    groups: dict[Key, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups

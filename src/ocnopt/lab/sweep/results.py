"""What a sweep has found: the best setting of every grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from statistics import mean, stdev
from typing import Any

from ocnopt.lab.recipes import Recipe
from ocnopt.lab.schema import Scalar
from ocnopt.lab.sweep.board import Entry, Standing
from ocnopt.lab.tasks import score


@dataclass(frozen=True)
class Setting:
    """One setting of a grid, over the seeds that are done: accuracies in percent or, ``by_loss``, losses."""

    key: str
    options: dict[str, Scalar]
    seeds: int
    validation: float
    test: float
    test_deviation: float | None  #: of the seeds; ``None`` for one seed
    seconds: float
    by_loss: bool = False  #: of a density: less is better

    @property
    def score(self) -> float:
        """By what settings are compared; more is better."""
        return -self.validation if self.by_loss else self.validation


@dataclass(frozen=True)
class Line:
    """One grid of a sweep: how far it is, and the setting with the best validation so far.

    Settings are compared only at equal numbers of seeds: the one with the most seeds done, then the best.
    """

    grid: str
    label: str
    points: int
    done: int
    failed: int
    best: Setting | None
    paper: float | None
    errors: list[str]

    def table(self) -> dict[str, Any]:
        return asdict(self)


def summarise(recipe: Recipe, entries: Sequence[Entry]) -> list[Line]:
    """A line for every grid that the sweep searches."""
    keys = list(dict.fromkeys(entry.point.grid.key for entry in entries))
    return [_line(recipe, key, [e for e in entries if e.point.grid.key == key]) for key in keys]


def _line(recipe: Recipe, key: str, entries: Sequence[Entry]) -> Line:
    by_setting: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.standing is Standing.DONE:
            by_setting.setdefault(entry.point.setting, []).append(entry)
    settings = [_setting(done) for done in by_setting.values()]
    return Line(
        grid=key,
        label=recipe.grids[key].label,
        points=len(entries),
        done=sum(len(done) for done in by_setting.values()),
        failed=sum(entry.standing is Standing.FAILED for entry in entries),
        best=max(settings, key=lambda s: (s.seeds, s.score), default=None),
        paper=recipe.paper.get(key),
        errors=list(dict.fromkeys(entry.error for entry in entries if entry.error is not None)),
    )


def _setting(entries: Sequence[Entry]) -> Setting:
    trials = [entry.trial for entry in entries if entry.trial is not None]
    by_loss = not all("test_accuracy" in trial.user_attrs for trial in trials)
    test = [_test(trial.user_attrs) for trial in trials]
    scores = mean(float(trial.value or 0.0) for trial in trials)
    return Setting(
        key=entries[0].point.setting,
        options={name: v for name, v in entries[0].point.values.items() if name != "seed"},
        seeds=len(trials),
        validation=-scores if by_loss else 100 * scores,
        test=mean(test),
        test_deviation=stdev(test) if len(test) > 1 and all(map(isfinite, test)) else None,
        seconds=mean(float(trial.user_attrs["seconds"]) for trial in trials),
        by_loss=by_loss,
    )


def _test(notes: Mapping[str, Any]) -> float:
    value = score(notes)
    return 100 * value if "test_accuracy" in notes else -value

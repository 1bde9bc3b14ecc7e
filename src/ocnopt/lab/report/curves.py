"""Runs of one method as one curve: the mean over seeds, the range they span, and where one was lost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ocnopt.lab.report.grouping import Measure
from ocnopt.lab.report.reading import Evaluation, Run

Against = Literal["step", "seconds"]

#: Points of a curve. Of more, neighbours are averaged: the loss of a single batch is mostly noise.
RESOLUTION = 48

#: The part of a run over which its losses are averaged, from each step backwards.
WINDOW = 1 / 8


@dataclass(frozen=True)
class Curve:
    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    lost: tuple[tuple[float, float], ...] = ()  # last finite point of each run that diverged


@dataclass(frozen=True)
class Sample:
    """One value of one run."""

    step: float
    seconds: float
    value: float


def loss_curve(runs: Sequence[Run], against: Against) -> Curve:
    """The loss of each step, as a running mean over the losses before it."""
    samples = [[Sample(p.step, p.seconds, p.loss) for p in run.points] for run in runs]
    return _curve(samples, against, [run.diverged for run in runs], WINDOW)


def test_curve(runs: Sequence[Run], measure: Measure, against: Against) -> Curve:
    """Test accuracy, or test loss where there is no accuracy, at the end of each epoch."""

    def value(end: Evaluation) -> float:
        return end.accuracy if measure == "accuracy" else end.test_loss

    samples = [[Sample(e.step, e.seconds, value(e)) for e in run.evaluations] for run in runs]
    return _curve(samples, against, [False] * len(runs))


def _curve(runs: Sequence[Sequence[Sample]], against: Against, lost: Sequence[bool], window: float = 0.0) -> Curve:
    # A step that gave no number leaves a gap: the run may have recovered.
    finite = [[sample for sample in run if _drawable(sample, against)] for run in runs]
    bin_of = _bins([sample.step for run in finite for sample in run])
    width = max(1, round(window * len(set(bin_of.values()))))
    binned = [_running_mean(_averaged(run, bin_of), width) for run in finite]
    columns: dict[int, list[Sample]] = {}
    for run in binned:
        for index, sample in run.items():
            columns.setdefault(index, []).append(sample)
    points = sorted(_column(members, against) for members in columns.values())
    x, mean, low, high = zip(*points, strict=True) if points else ((), (), (), ())
    ends = [list(run.values())[-1] for run, gone in zip(binned, lost, strict=True) if gone and run]
    return Curve(x, mean, low, high, tuple((getattr(end, against), end.value) for end in ends))


def _drawable(sample: Sample, against: Against) -> bool:
    return math.isfinite(sample.value) and math.isfinite(getattr(sample, against))


def _bins(steps: Sequence[float]) -> dict[float, int]:
    """Each step by itself; many steps share ``RESOLUTION`` bins, as many in each."""
    ordered = sorted(set(steps))
    count = min(len(ordered), RESOLUTION)
    return {step: i * count // len(ordered) for i, step in enumerate(ordered)}


def _averaged(run: Sequence[Sample], bin_of: Mapping[float, int]) -> dict[int, Sample]:
    members: dict[int, list[Sample]] = {}
    for sample in run:
        members.setdefault(bin_of[sample.step], []).append(sample)
    return {
        index: Sample(_mean(m.step for m in bin), _mean(m.seconds for m in bin), _mean(m.value for m in bin))
        for index, bin in members.items()
    }


def _running_mean(run: Mapping[int, Sample], width: int) -> dict[int, Sample]:
    """Over this bin and those before it, ``width`` in all."""
    return {
        index: replace(sample, value=_mean(run[i].value for i in range(index - width + 1, index + 1) if i in run))
        for index, sample in run.items()
    }


def _column(members: Sequence[Sample], against: Against) -> tuple[float, float, float, float]:
    values = [member.value for member in members]
    return _mean(getattr(member, against) for member in members), _mean(values), min(values), max(values)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)

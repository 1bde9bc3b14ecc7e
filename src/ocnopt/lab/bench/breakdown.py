"""Where the time of a step goes: forward, backward, capture, and the phases that the optimizer names."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

import torch

from ocnopt import phases
from ocnopt.lab.bench.contenders import CONTENDERS, Contender
from ocnopt.lab.bench.timing import rotated, wait
from ocnopt.lab.bench.training import Setup, Training

_FORWARD, _BACKWARD, _STEP = phases.Phase("forward"), phases.Phase("backward"), phases.Phase("step")

#: in the order of a step
PHASES = ("forward", "backward", "capture", "gradients", "curvature", "bellman", "rollout", "update", "rest")


class Stopwatch:
    """A listener to phases: milliseconds in each, without those of phases inside it."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self.ms: dict[str, float] = defaultdict(float)
        self._device, self._clock = device, clock
        self._open: list[str] = []
        self._since = 0.0

    def begin(self, name: str) -> None:
        self._book()
        self._open.append(name)

    def end(self, name: str) -> None:
        self._book()
        self._open.pop()

    def _book(self) -> None:
        """Whatever is underway gets the time since the last change."""
        wait(self._device)
        now = self._clock()
        if self._open:
            self.ms[self._open[-1]] += 1e3 * (now - self._since)
        self._since = now


def stopped_step(training: Training, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Milliseconds by phase of one eager step."""
    watch = Stopwatch(training.device, clock)
    with phases.told(watch), _STEP:
        training.optimizer.zero_grad()
        with _FORWARD:
            loss = training.loss()
        with _BACKWARD:
            loss.backward()
        training.optimizer.step()
    named = set(watch.ms) - {"forward", "backward", "step"}
    watch.ms["rest" if named else "update"] += watch.ms.pop("step")
    return dict(watch.ms)


@dataclass(frozen=True)
class Breakdown:
    """Mean milliseconds by phase, which add up to the step."""

    optimizer: str
    title: str
    ms: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.ms.values())

    def document(self) -> dict[str, object]:
        return {**asdict(self), "total_ms": self.total}


def middle(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean by phase, over the half of the steps whose totals are in the middle: the others were disturbed."""
    quarter = len(steps) // 4
    chosen = sorted(steps, key=lambda ms: sum(ms.values()))[quarter : len(steps) - quarter]
    return {name: statistics.fmean(ms.get(name, 0.0) for ms in chosen) for name in PHASES}


def against(bare: dict[str, float], ours: dict[str, float]) -> dict[str, float]:
    """Forward and backward are those of a network that nobody watches; what they take beyond that is the capture."""
    extra = sum(ours[name] - bare[name] for name in ("forward", "backward"))
    return {**ours, "forward": bare["forward"], "backward": bare["backward"], "capture": extra}


def break_down(
    contenders: Sequence[Contender], setup: Setup, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[Breakdown]:
    """Eager, ordinary steps of all contenders, which take turns. Who runs out of memory has no numbers."""
    bare = CONTENDERS["sgd"]  # hooks nothing
    every = {c.name: c for c in (bare, *contenders)}
    trainings: dict[str, Training] = {}
    for name, contender in every.items():
        with suppress(torch.OutOfMemoryError):
            training = setup.build(contender)
            training.take(training.warm_up)
            training.pause_refreshes()
            trainings[name] = training
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in trainings}
    for turn in range(rounds):
        for name in rotated(list(steps), turn):
            try:
                steps[name].append(stopped_step(trainings[name], clock))
            except torch.OutOfMemoryError:
                del steps[name], trainings[name]
    nothing = dict.fromkeys(PHASES, math.nan)
    found = {name: middle(theirs) for name, theirs in steps.items()}
    first = found.get(bare.name, nothing)
    ms = {c.name: against(first, found[c.name]) if c.name in found else nothing for c in contenders}
    return [Breakdown(c.name, c.title, ms[c.name]) for c in contenders]

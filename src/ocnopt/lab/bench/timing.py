"""Clocks, turns and spreads."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from ocnopt.curvature import beside

K = TypeVar("K")
Work = Callable[[], object]

#: process: CPU time, for a machine that is busy
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "process": time.process_time}


def wait(device: torch.device) -> None:
    """For what has been launched, as a loop does that looks at its loss. Not for what goes on beside it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def be_alone(device: torch.device) -> None:
    """Until nothing goes on any more, eigendecompositions beside the steps of somebody else, say."""
    beside.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Work, times: int, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Milliseconds for one of ``times`` calls, until the device is done with them."""
    wait(device)
    start = clock()
    for _ in range(times):
        work()
    wait(device)
    return 1e3 * (clock() - start) / times


class Spread(NamedTuple):
    """Median and quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Of the ratios within the rounds: a machine that slows down for a while slows both."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def rotated(names: Sequence[K], turn: int) -> list[K]:
    """A B C, B C A, …: nobody always follows the same neighbour."""
    shift = turn % max(1, len(names))
    return [*names[shift:], *names[:shift]]


@dataclass(frozen=True)
class Turns:
    """How contenders take turns: ``rounds`` of ``inner`` steps each, no round begun after ``budget`` seconds."""

    rounds: int = 10
    inner: int = 1
    clock: str = "wall"
    budget: float = math.inf

    def take(self, works: Mapping[K, Work], device: torch.device) -> dict[K, list[float]]:
        """Milliseconds of one call, for each round. Whoever runs out of memory is left out."""
        found = {name: list[float]() for name in works}
        deadline = time.monotonic() + self.budget
        for turn in range(self.rounds):
            if turn >= 2 and time.monotonic() > deadline:  # two rounds at least: one has no spread
                break
            for name in rotated(list(found), turn):
                be_alone(device)
                try:
                    found[name].append(timed(works[name], self.inner, device, CLOCKS[self.clock]))
                except torch.OutOfMemoryError:
                    del found[name]
        return found

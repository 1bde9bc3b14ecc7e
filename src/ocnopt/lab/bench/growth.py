"""How the time of a step grows with the depth and width of a network, the batch and the rank: time ≈ a · n^p."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from ocnopt.lab.bench.contenders import Contender
from ocnopt.lab.bench.networks import NETWORKS
from ocnopt.lab.bench.timing import Turns
from ocnopt.lab.bench.training import Setup
from ocnopt.lab.schema import ConfigError

WAYS = ("depth", "width", "batch", "rank")
BATCHES = (32, 64, 128, 256)
RANKS = (1, 2, 4, 8, 16, 32)


class Power(NamedTuple):
    """time ≈ a · n^p, from so many points."""

    a: float
    p: float
    points: int


def fit(sizes: Sequence[float], times: Sequence[float]) -> Power | None:
    """By least squares on logarithms, over the positive times; ``None`` if they are fewer than three."""
    points = [(math.log(n), math.log(t)) for n, t in zip(sizes, times, strict=True) if t > 0]
    if len(points) < 3:
        return None
    xs, ys = zip(*points, strict=True)
    p, log_a = statistics.linear_regression(xs, ys)
    return Power(math.exp(log_a), p, len(points))


@dataclass(frozen=True)
class Growth:
    """One contender over one family: medians, not a number where memory was not enough. ``gradient_ms``: forward and
    backward of a network that nobody watches. ``own_ms``: the rest of a step, by the differences within rounds.
    """

    way: str
    network: str
    optimizer: str
    title: str
    sizes: list[int]
    step_ms: list[float]
    gradient_ms: list[float]
    own_ms: list[float]

    def add(self, size: int, step: Sequence[float], gradient: Sequence[float]) -> None:
        """The rounds of one size. There are none where memory was not enough."""
        both = zip(step, gradient, strict=True) if step and gradient else ()
        self.sizes.append(size)
        self.step_ms.append(_median(step))
        self.gradient_ms.append(_median(gradient))
        self.own_ms.append(_median([a - b for a, b in both]))

    @property
    def whole(self) -> Power | None:
        return fit(self.sizes, self.step_ms)

    @property
    def own(self) -> Power | None:
        return fit(self.sizes, self.own_ms)

    def document(self) -> dict[str, Any]:
        powers = {"step": self.whole, "own": self.own}
        fits = {name: None if power is None else power._asdict() for name, power in powers.items()}
        return {**asdict(self), "fits": fits}


def sizes_of(way: str, network: str, batch: int) -> tuple[int, ...]:
    """The family, from small to large."""
    if way == "batch":
        return BATCHES
    if way == "rank":
        return tuple(rank for rank in RANKS if rank <= batch)
    if way not in NETWORKS[network].sizes:
        able = [name for name, each in NETWORKS.items() if way in each.sizes]
        raise ConfigError(f"growth: {network} has no other {way}; networks that have: {', '.join(able)}")
    return NETWORKS[network].sizes[way][1]


def grow(
    way: str,
    network: str,
    contenders: Sequence[Contender],
    setup: Setup,
    turns: Turns,
    tell: Callable[[str], None],
    sizes: Sequence[int],
) -> list[Growth]:
    """Time the family. Contenders without a rank are not in a family of ranks."""
    playing = list(contenders)
    if way == "rank":
        playing = list({first.name: first for c in contenders if (first := c.with_rank(1)) is not None}.values())
    titles = [c.title.partition(" r=")[0] if way == "rank" else c.title for c in playing]
    found = [Growth(way, network, c.name, title, [], [], [], []) for c, title in zip(playing, titles, strict=True)]
    for size in sizes:
        here = setup
        if way == "batch":
            here = replace(setup, batch=size)
        elif way != "rank":
            here = replace(setup, network=setup.network.grown(way, size))
        gradient, *steps = _rounds([c.with_rank(size) or c if way == "rank" else c for c in playing], here, turns)
        for growth, step in zip(found, steps, strict=True):
            growth.add(size, step, gradient)
        told = [f"{_median(step):.1f} ms" if step else "out of memory" for step in steps]
        tell(f"{network}, {way} {size}: {', '.join(told)}")
    return found


def _rounds(contenders: Sequence[Contender], setup: Setup, turns: Turns) -> list[list[float]]:
    """Of the gradient alone, then of each contender; empty for whoever runs out of memory."""
    works: dict[int, Callable[[], None]] = {}
    with suppress(torch.OutOfMemoryError):
        gradient = setup.gradient()
        _twice(gradient)
        works[0] = gradient
    for i, contender in enumerate(contenders, 1):
        with suppress(torch.OutOfMemoryError):
            training = setup.build(contender)
            _twice(training.step)
            training.pause_refreshes()
            works[i] = training.step
    times = turns.take(works, setup.device)
    return [times.get(i, []) for i in range(len(contenders) + 1)]


def _twice(work: Callable[[], None]) -> None:
    for _ in range(2):
        work()


def _median(times: Sequence[float]) -> float:
    return statistics.median(times) if times else math.nan

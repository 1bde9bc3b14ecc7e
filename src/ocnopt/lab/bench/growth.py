"""How the time of a step grows with the depth and width of a network, the batch and the rank: time ≈ a · n^p."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from ocnopt.lab.bench.contenders import Contender
from ocnopt.lab.bench.networks import NETWORKS
from ocnopt.lab.bench.timing import Turns
from ocnopt.lab.bench.training import Setup
from ocnopt.lab.schema import ConfigError

WAYS = ("depth", "width", "batch", "rank")
BATCHES = (32, 64, 128, 256)
RANKS = (1, 2, 4, 8, 16, 32)


class Power(NamedTuple):
    """time ≈ a · n^p."""

    a: float
    p: float


def fit(sizes: Sequence[float], times: Sequence[float]) -> Power | None:
    """By least squares on logarithms, over the positive times; ``None`` if they are fewer than two."""
    points = [(math.log(n), math.log(t)) for n, t in zip(sizes, times, strict=True) if t > 0]
    if len(points) < 2:
        return None
    xs, ys = zip(*points, strict=True)
    p, log_a = statistics.linear_regression(xs, ys)
    return Power(math.exp(log_a), p)


@dataclass(frozen=True)
class Growth:
    """One contender over one family. ``gradient_ms``: forward and backward of a network that nobody watches, measured
    in the same rounds; the rest of a step is the optimizer's own.
    """

    way: str
    network: str
    optimizer: str
    title: str
    sizes: list[int]
    step_ms: list[float]
    gradient_ms: list[float]

    @property
    def own_ms(self) -> list[float]:
        return [step - gradient for step, gradient in zip(self.step_ms, self.gradient_ms, strict=True)]

    @property
    def whole(self) -> Power | None:
        return fit(self.sizes, self.step_ms)

    @property
    def own(self) -> Power | None:
        return fit(self.sizes, self.own_ms)

    def document(self) -> dict[str, Any]:
        powers = {"step": self.whole, "own": self.own}
        fits = {name: None if power is None else power._asdict() for name, power in powers.items()}
        return {**asdict(self), "own_ms": self.own_ms, "fits": fits}


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
    found = [Growth(way, network, c.name, title, [], [], []) for c, title in zip(playing, titles, strict=True)]
    for size in sizes:
        here = setup
        if way == "batch":
            here = replace(setup, batch=size)
        elif way != "rank":
            here = replace(setup, network=setup.network.grown(way, size))
        times = _medians([c.with_rank(size) or c if way == "rank" else c for c in playing], here, turns)
        for growth, step in zip(found, times[1:], strict=True):
            growth.sizes.append(size)
            growth.step_ms.append(step)
            growth.gradient_ms.append(times[0])
        tell(f"{network}, {way} {size}: {', '.join(f'{ms:.1f}' for ms in times[1:])} ms")
    return found


def _medians(contenders: Sequence[Contender], setup: Setup, turns: Turns) -> list[float]:
    """Of the gradient alone, then of each contender."""
    trainings = [setup.build(contender) for contender in contenders]
    works: list[Callable[[], None]] = [setup.gradient(), *(training.step for training in trainings)]
    for work in works:
        for _ in range(2):
            work()
    for training in trainings:
        training.pause_refreshes()
    return [statistics.median(times) for times in turns.take(dict(enumerate(works)), setup.device).values()]

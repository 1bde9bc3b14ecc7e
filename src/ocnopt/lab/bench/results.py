"""What a benchmark found, contender by contender."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ocnopt.lab.bench.contenders import BASELINES, CONTENDERS, REFRESH
from ocnopt.lab.bench.timing import Spread, ratio


@dataclass(frozen=True)
class Refresh:
    """Steps that refresh what changes slowly. ``refresh_ms``: one that refreshes everything, or, of a whole period of
    single steps, ``period_ms``, the longest of them.
    """

    refresh_ms: float
    period_ms: list[float] = field(default_factory=list)

    def amortised(self, ordinary: float) -> float:
        """The mean of a step, over a period."""
        if self.period_ms:
            return statistics.fmean(self.period_ms)
        return ordinary + (self.refresh_ms - ordinary) / REFRESH

    def worst(self, ordinary: float) -> float:
        """The longest step as a multiple of an ordinary one."""
        return self.refresh_ms / (statistics.median(self.period_ms) if self.period_ms else ordinary)


@dataclass(frozen=True)
class Result:
    """One contender on one network at one batch size. Times are in milliseconds a step, one for each round."""

    network: str
    batch: int
    optimizer: str
    title: str
    graphed: bool
    rounds_ms: list[float]
    first_ms: float
    peak_bytes: int | None = None
    refresh: Refresh | None = None
    captures: int = 0
    reason: str | None = None  #: why there is no graph, where there was to be one
    error: str | None = None  #: why there are no times

    @property
    def label(self) -> str:
        return f"{self.title}, graphed" if self.graphed else self.title

    @property
    def spread(self) -> Spread:
        return Spread.of(self.rounds_ms)

    @property
    def amortised(self) -> float:
        """The mean of a step with its share of the refreshes; the median where there are none."""
        ordinary = self.spread.median
        return ordinary if self.refresh is None else self.refresh.amortised(ordinary)

    @property
    def peak_mib(self) -> float | None:
        return None if self.peak_bytes is None else self.peak_bytes / 2**20


@dataclass(frozen=True)
class Comparison:
    """The contenders of one network and batch size, measured in the same rounds."""

    results: Sequence[Result]

    def find(self, optimizer: str, graphed: bool) -> Result | None:
        same = (r for r in self.results if (r.optimizer, r.graphed) == (optimizer, graphed) and r.error is None)
        return next(same, None)

    def ratios(self, result: Result) -> dict[str, Spread]:
        """Of times, to baselines of the same kind, and to eager SGD where graphs are measured."""
        if result.error is not None:
            return {}
        to = {name: self.find(name, result.graphed) for name in BASELINES}
        if any(each.graphed for each in self.results):
            to["sgd, eager"] = self.find("sgd", graphed=False)
        return {name: ratio(result.rounds_ms, base.rounds_ms) for name, base in to.items() if base is not None}

    def amortised_to_ekfac(self, result: Result) -> float | None:
        """To that of the same kind: in graphs, to the contender that takes its steps there."""
        name = CONTENDERS["ekfac"].captured if result.graphed else "ekfac"
        ekfac = None if name is None else self.find(name, result.graphed)
        return None if ekfac is None or result.refresh is None else result.amortised / ekfac.amortised

    def memory_ratios(self, result: Result) -> dict[str, float]:
        to = {name: self.find(name, result.graphed) for name in BASELINES}
        known = {name: base.peak_bytes for name, base in to.items() if base is not None and base.peak_bytes}
        return {} if not result.peak_bytes else {name: result.peak_bytes / theirs for name, theirs in known.items()}

    def document(self) -> list[dict[str, Any]]:
        """For machines."""
        return [self._document(result) for result in self.results]

    def _document(self, result: Result) -> dict[str, Any]:
        found = {**asdict(result), "label": result.label, "peak_mib": result.peak_mib}
        if result.error is not None:
            return found
        low, median, high = result.spread
        found |= {"median_ms": median, "low_ms": low, "high_ms": high, "mean_ms": statistics.fmean(result.rounds_ms)}
        found["ratios"] = {name: spread._asdict() for name, spread in self.ratios(result).items()}
        found["memory_ratios"] = self.memory_ratios(result)
        if result.refresh is not None:
            found["amortised_ms"] = result.amortised
            found["amortised_to_ekfac"] = self.amortised_to_ekfac(result)
            found["worst_step"] = result.refresh.worst(median)
        return found


def by_workload(results: Sequence[Result]) -> Mapping[tuple[str, int], Comparison]:
    groups: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        groups.setdefault((result.network, result.batch), []).append(result)
    return {key: Comparison(theirs) for key, theirs in groups.items()}

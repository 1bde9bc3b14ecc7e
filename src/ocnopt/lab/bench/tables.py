"""The numbers of a benchmark as tables, for a terminal, a page or a pipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ocnopt.lab.bench.breakdown import PHASES, Breakdown
from ocnopt.lab.bench.growth import Growth, Power
from ocnopt.lab.bench.results import Comparison, Result
from ocnopt.lab.bench.timing import Spread

NOTHING = "–"


@dataclass(frozen=True)
class Table:
    """Headings and cells; the first column is text, the others are numbers."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.headings) - 1)]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.headings, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines, *(f"\n{note}" for note in self.notes)])


def of_comparison(comparison: Comparison) -> list[Table]:
    """Times and memory of all; and of those that refresh something, what that adds."""
    results = comparison.results
    title = f"{results[0].network}, batch {results[0].batch}"
    to = [name for name in ("sgd", "adam", "sgd, eager") if any(name in comparison.ratios(r) for r in results)]
    headings = ["optimizer", "ms", "quartiles", *(f"time × {name}" for name in to), "MiB"]
    headings += ["memory × sgd", "memory × adam"]
    rows = [[result.label, *_times(comparison, result, to), *_memory(comparison, result)] for result in results]
    why = {result.reason: result.label for result in reversed(results) if result.reason is not None}
    notes = [f"{label} is not in a graph: {reason}." for reason, label in why.items()]
    notes += [f"{result.label}: {result.error}." for result in results if result.error is not None]
    tables = [Table(title, headings, rows, notes)]
    refreshing = [result for result in results if result.refresh is not None]
    if refreshing:
        tables.append(_of_refreshes(title, comparison, refreshing))
    return tables


def _times(comparison: Comparison, result: Result, to: Sequence[str]) -> list[str]:
    if result.error is not None:
        return [NOTHING] * (2 + len(to))
    low, median, high = result.spread
    ratios = comparison.ratios(result)
    return [f"{median:.2f}", f"{low:.2f} – {high:.2f}", *(_ratio(ratios.get(name)) for name in to)]


def _memory(comparison: Comparison, result: Result) -> list[str]:
    ratios = comparison.memory_ratios(result)
    peak = NOTHING if result.peak_mib is None else f"{result.peak_mib:.0f}"
    return [peak, *(f"{ratios[name]:.2f}" if name in ratios else NOTHING for name in ("sgd", "adam"))]


def _ratio(spread: Spread | None) -> str:
    return NOTHING if spread is None else f"{spread.median:.2f}"


def _of_refreshes(title: str, comparison: Comparison, results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        assert result.refresh is not None
        median, to_ekfac = result.spread.median, comparison.amortised_to_ekfac(result)
        how = "period" if result.refresh.period_ms else "at once"
        cells = [f"{median:.2f}", f"{result.refresh.refresh_ms:.2f}", how, f"{result.amortised:.2f}"]
        worst = f"{result.refresh.worst(median):.2f}"
        rows.append([result.label, *cells, NOTHING if to_ekfac is None else f"{to_ekfac:.2f}", worst])
    headings = ["optimizer", "ms", "longest ms", "measured", "amortised ms", "× ekfac", "longest × median"]
    return Table(f"{title}: refreshes every 100 steps", headings, rows)


def of_breakdowns(title: str, breakdowns: Sequence[Breakdown]) -> Table:
    rows = [[b.title, *(_ms(b.ms[name]) for name in PHASES), _ms(b.total)] for b in breakdowns]
    return Table(f"{title}: ms by phase of an eager, ordinary step", ["optimizer", *PHASES, "sum"], rows)


def of_growth(growths: Sequence[Growth]) -> Table:
    """All of one network and one way to grow."""
    first = growths[0]
    rows = [[g.title, *map(_ms, g.step_ms), _power(g.whole, g), _power(g.own, g)] for g in growths]
    headings = ["ms", *(f"{first.way} {size}" for size in first.sizes), "step ~", "own part ~"]
    note = f"n is the {first.way}; the own part is a step without forward and backward."
    return Table(f"{first.network}: growth with the {first.way}", headings, rows, [note])


def _ms(number: float) -> str:
    return NOTHING if math.isnan(number) else f"{number:.2f}"


def _power(power: Power | None, growth: Growth) -> str:
    """With the number of points, where it is not all of them."""
    if power is None:
        return NOTHING
    used = "" if power.points == len(growth.sizes) else f" ({power.points} of {len(growth.sizes)})"
    return f"n^{power.p:.2f}{used}"

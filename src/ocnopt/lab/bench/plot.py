"""The paper's figure of complexity: time and memory of a step against the batch size; and growth with anything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ocnopt.lab.bench.benchmark import Findings
from ocnopt.lab.bench.growth import Growth
from ocnopt.lab.bench.results import Result
from ocnopt.lab.report.palette import LIGHT
from ocnopt.lab.schema import ConfigError

_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_MARKS = "osD^vPX*"


class Column(NamedTuple):
    """Panels of one network, one above another: lines of (size, value), and what they are."""

    title: str
    size: str
    panels: Sequence[tuple[str, Mapping[str, Sequence[tuple[int, float]]]]]


def draw(findings: Findings, path: Path) -> None:
    """Log-log, a column for each network or way to grow."""
    columns = [_of_growth(family) for family in findings.growth] or [
        _of_results(network, [r for r in findings.results if r.network == network])
        for network in dict.fromkeys(result.network for result in findings.results)
    ]
    _draw(path, columns)


def require_drawable(path: Path) -> None:
    """The ending of the name is a format of pictures, or there is none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in known:
        raise ConfigError(f"plot must end in one of {', '.join(f'.{each}' for each in known)}; got {str(path)!r}")


def _of_results(network: str, results: Sequence[Result]) -> Column:
    times: dict[str, list[tuple[int, float]]] = {}
    memory: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        if result.error is None:
            times.setdefault(result.label, []).append((result.batch, result.amortised))
        if result.peak_mib is not None:
            memory.setdefault(result.label, []).append((result.batch, result.peak_mib))
    panels = [("ms per step", times)] + ([("peak memory, MiB", memory)] if memory else [])
    return Column(network, "batch size", panels)


def _of_growth(family: Sequence[Growth]) -> Column:
    def lines(key: str) -> dict[str, list[tuple[int, float]]]:
        return {g.title: [(n, t) for n, t in zip(g.sizes, getattr(g, key), strict=True) if t > 0] for g in family}

    first = family[0]
    panels = [("ms per step", lines("step_ms")), ("optimizer's own part, ms", lines("own_ms"))]
    return Column(f"{first.network}, {first.way}", first.way, panels)


def _draw(path: Path, columns: Sequence[Column]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(label for column in columns for _, lines in column.panels for label in lines))
    rows = max(len(column.panels) for column in columns)
    legend = -(-len(labels) // 3)
    drawing = Figure(figsize=(max(7.5, 4.4 * len(columns)), 2.9 * rows + 0.2 * legend + 0.3), layout="constrained")
    FigureCanvasAgg(drawing)
    axes = drawing.subplots(rows, len(columns), squeeze=False)
    handles: dict[str, Any] = {}
    for i, column in enumerate(columns):
        for j, (what, lines) in enumerate(column.panels):
            ax = axes[j][i]
            for label, points in lines.items():
                if points:
                    style = _style(labels.index(label))
                    (handles[label],) = ax.plot(*zip(*points, strict=True), label=label, ms=4, lw=1.4, **style)
            sizes = sorted({n for points in lines.values() for n, _ in points})
            _dress(ax, what, column.size if j == len(column.panels) - 1 else "", sizes)
        axes[0][i].set_title(column.title, fontsize=10)
        for unused in axes[len(column.panels) :, i]:
            unused.set_visible(False)
    found = [label for label in labels if label in handles]
    drawing.legend([handles[label] for label in found], found, loc="outside lower center", fontsize=8, ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=150)


def _style(index: int) -> dict[str, Any]:
    hues = len(LIGHT)
    return {
        "color": LIGHT[index % hues],
        "linestyle": _DASHES[(index // hues) % len(_DASHES)],
        "marker": _MARKS[(index + index // hues) % len(_MARKS)],
    }


def _dress(ax: Any, what: str, size: str, sizes: Sequence[int]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(sizes, [str(n) for n in sizes])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_ylabel(what)
    ax.set_xlabel(size)
    ax.grid(alpha=0.3)

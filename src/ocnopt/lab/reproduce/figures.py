"""The figures of the experiments, as PNG files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from ocnopt.lab.optimizers import OPTIMIZERS
from ocnopt.lab.reproduce.paper import COLUMNS, Row
from ocnopt.lab.sweep import Line

COLORS = {
    "sgdm": "#4477aa",
    "sgd": "#4477aa",
    "rmsprop": "#66ccee",
    "adam": "#228833",
    "ekfac": "#ccbb44",
    "emsa": "#aa3377",
    "ddp": "#bbbbbb",
    "ocnopt": "#ee6677",
}
#: percentage points that a panel of accuracies reaches below the best number of the paper
DEPTH = 30.0


@contextmanager
def figure(path: Path, rows: int, columns: int, width: float = 3.2, height: float = 2.6) -> Iterator[Any]:
    """A grid of axes, written to the file at the end. No window, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(drawing)
    yield drawing.subplots(rows, columns, squeeze=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, dpi=150)


def draw_table(path: Path, rows: Sequence[Row], found: Mapping[str, Sequence[Line]]) -> None:
    """A panel per row: our mean with its deviation, and the paper's number as a hollow mark.

    What is far below all of the paper's numbers would flatten the rest: an arrow and its number stand for it.
    """
    columns = min(4, len(rows))
    lines = -(-len(rows) // columns)
    with figure(path, lines, columns, 3.4, 2.8) as axes:
        flat = [ax for line in axes for ax in line]
        for ax in flat[len(rows) :]:
            ax.set_visible(False)
        for ax, row in zip(flat, rows, strict=False):
            best = {line.grid: line.best for line in found[row.name] if line.best is not None}
            floor = max(row.accuracy.values()) - DEPTH
            for i, key in enumerate(COLUMNS):
                setting = best.get(key)
                if setting is not None and setting.test < floor:
                    place = {"transform": ax.get_xaxis_transform(), "ha": "center"}
                    ax.text(i, 0.03, f"↓ {setting.test:.0f}", color=COLORS[key], **place)
                elif setting is not None:
                    ax.errorbar(i, setting.test, setting.test_deviation or 0, fmt="o", color=COLORS[key], capsize=3)
                if key in row.accuracy:
                    ax.plot(i, row.accuracy[key], "D", mfc="none", mec="#555555", ms=6)
            ax.set_xticks(range(len(COLUMNS)), [OPTIMIZERS[key].title for key in COLUMNS], rotation=45, ha="right")
            ax.set_title(f"{row.dataset}, {row.network}", fontsize=10)
            ax.grid(axis="y", alpha=0.3)
        for line in axes:
            line[0].set_ylabel("test accuracy %\n● ours  ◇ paper")


def draw_curves(
    path: Path, panels: Mapping[str, str], curves: Mapping[tuple[str, str], Sequence[Sequence[float]]]
) -> None:
    """A panel per dataset: the median over seeds of the smoothed training loss, and its range.

    A run that ends early or is no longer finite counts as one with a loss beyond all bounds from there on, and a cross
    at the upper edge shows where: the median leaves the panel when most runs do. The panel ends at four times the loss
    that the curves begin with.
    """
    with figure(path, 1, len(panels), 4.0, 3.2) as axes:
        for ax, (dataset, title) in zip(axes[0], panels.items(), strict=True):
            methods = [method for name, method in curves if name == dataset]
            losses = [loss for method in methods for run in curves[dataset, method] for loss in run if isfinite(loss)]
            low, high = (0.8 * min(losses), min(1.2 * max(losses), 4 * losses[0])) if losses else (0.1, 10.0)
            longest = max(len(run) for method in methods for run in curves[dataset, method])
            for method, color in zip(methods, ("#4477aa", "#ee6677", "#ccbb44", "#228833"), strict=False):
                _draw_runs(ax, method, curves[dataset, method], longest, color, high)
            ax.set_yscale("log")
            ax.set_ylim(low, high)
            _write_plain_numbers(ax)
            ax.set_title(title, fontsize=10)
            ax.set_xlabel("step")
            ax.grid(alpha=0.3)
        axes[0][0].set_ylabel("training loss (smoothed)")
        axes[0][0].legend(fontsize=8)


def _draw_runs(ax: Any, method: str, runs: Sequence[Sequence[float]], longest: int, color: str, high: float) -> None:
    import numpy as np

    values = np.full((len(runs), longest), np.inf)
    for line, run in zip(values, runs, strict=True):
        finite = next((i for i, loss in enumerate(run) if not isfinite(loss)), len(run))
        line[:finite] = run[:finite]
        if finite < longest:
            ax.plot(finite, high, "x", color=color, ms=8, clip_on=False, zorder=3)
    window = max(1, longest // 25)
    smooth = np.array([np.convolve(line, np.ones(window) / window, "valid") for line in values])
    smooth = smooth.clip(max=100 * high)  # beyond the panel, and still a number that can be drawn
    steps = np.arange(window, longest + 1)
    ax.plot(steps, np.median(smooth, 0), color=color, label=method)
    ax.fill_between(steps, smooth.min(0), smooth.max(0), color=color, alpha=0.2, lw=0)


def draw_heat_map(
    path: Path,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Mapping[tuple[str, str], float],
    doubtful: Collection[tuple[str, str]] = (),
) -> None:
    """Red is better with feedback, blue is worse; the number is in the cell. Doubtful cells are hatched instead."""
    from matplotlib.patches import Rectangle

    table = [[0.0 if (row, column) in doubtful else values[row, column] for column in columns] for row in rows]
    limit = max(5.0, *(abs(value) for line in table for value in line))  # small changes are to look small
    with figure(path, 1, 1, 1.2 * len(columns) + 2.6, 0.55 * len(rows) + 1.2) as axes:
        ax = axes[0][0]
        ax.imshow(table, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
        ax.set_xticks(range(len(columns)), columns)
        ax.set_yticks(range(len(rows)), rows)
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                text, color = f"{values[row, column]:+.2f}", "white" if abs(table[i][j]) > 0.6 * limit else "black"
                if (row, column) in doubtful:
                    text, color = f"[{text}]", "#666666"
                    ax.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, fill=False, hatch="//", ec="#cccccc", lw=0))
                ax.text(j, i, text, ha="center", va="center", color=color)
        ax.set_title("change of test accuracy with feedback, %", fontsize=10)


def draw_complexity(
    path: Path,
    titles: Sequence[str],
    panels: Sequence[Mapping[str, Sequence[tuple[int, float | None, float | None]]]],
) -> None:
    """Log-log: time above, memory below, a column per network."""
    from matplotlib.ticker import NullLocator

    colors = ("#4477aa", "#228833", "#ccbb44", "#aa3377", "#ee6677", "#000000", "#ee8866")
    with figure(path, 2, len(panels), 4.8, 3.2) as axes:
        for column, (title, lines) in enumerate(zip(titles, panels, strict=True)):
            for (method, points), color in zip(lines.items(), colors, strict=True):
                for line in (0, 1):
                    known = [(point[0], point[1 + line]) for point in points if point[1 + line]]
                    ax = axes[line][column]
                    ax.loglog(*zip(*known, strict=True), "o-", color=color, label=method, ms=4) if known else None
                    ax.set_xticks([point[0] for point in points], [str(point[0]) for point in points])
                    ax.xaxis.set_minor_locator(NullLocator())
                    ax.grid(alpha=0.3)
            for line in (0, 1):
                if axes[line][column].lines:  # memory cannot be measured everywhere
                    _write_plain_numbers(axes[line][column])
            axes[0][column].set_title(title, fontsize=10)
            axes[1][column].set_xlabel("batch size")
        axes[0][0].set_ylabel("seconds per step")
        axes[1][0].set_ylabel("peak memory, MB")
        handles, labels = axes[0][0].get_legend_handles_labels()
        axes[0][0].figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=3)


def _write_plain_numbers(ax: Any) -> None:
    """1, 2, 5, 10 instead of powers of ten on a logarithmic axis."""
    from matplotlib.ticker import LogLocator

    ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    for write in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
        write("{x:g}")


def draw_gains(path: Path, x: Any, y: Any, second: Any, gains: Sequence[Any], shown: Sequence[int]) -> None:
    """A line per image: the image, the difference that the layers respond to, and how much each layer does."""
    with figure(path, len(shown), 3, 2.2, 2.2) as axes:
        for line, i in zip(axes, shown, strict=True):
            line[0].imshow(x[i, 0].numpy(), cmap="gray")
            line[0].set_title(f"a {int(y[i])}, not a {int(second[i])}", fontsize=9)
            picture = gains[0].image[i].mean(0)
            limit = float(picture.abs().max()) or 1.0
            line[1].imshow(picture.numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
            line[1].set_title("δx_max", fontsize=9)
            shares = [100 * float(gain.state[i].square().sum()) for gain in gains]  # the vectors have length 1
            line[2].bar([gain.layer for gain in gains], shares, color=COLORS["ocnopt"])
            line[2].set_title("share of the vector, %", fontsize=9)
            line[2].set_xlabel("layer", fontsize=8)
            for ax in line[:2]:
                ax.set_axis_off()

"""The figures of the experiments on Neural ODEs, as PNG files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ocnopt.lab.reproduce.continuous import METHODS, TITLES, Column, Found, Place
from ocnopt.lab.reproduce.figures import COLORS, figure


def _unit(column: Column) -> str:
    return "negative log-likelihood" if column.by_loss else "test accuracy %"


def _panels(axes: Any, count: int) -> list[Any]:
    flat = [ax for line in axes for ax in line]
    for ax in flat[count:]:
        ax.set_visible(False)
    return flat[:count]


def _rows(count: int, columns: int) -> int:
    return -(-count // columns)


def draw_table(path: Path, columns: Sequence[Column], found: Mapping[Place, Found], solver: str) -> None:
    """A panel per dataset: our mean with its deviation, and the paper's number as a hollow mark."""
    wide = min(3, len(columns))
    with figure(path, _rows(len(columns), wide), wide, 3.0, 2.6) as axes:
        for ax, column in zip(_panels(axes, len(columns)), columns, strict=True):
            printed = column.in_paper(solver)
            for i, method in enumerate(METHODS):
                tests = [value for value in found[column.key, method].tests() if math.isfinite(value)]
                if tests:
                    spread = stdev(tests) if len(tests) > 1 else 0.0
                    ax.errorbar(i, mean(tests), spread, fmt="o", color=COLORS[method], capsize=3)
                if printed:
                    ax.plot(i, printed[method], "D", mfc="none", mec="#555555", ms=6)
            ax.set_xticks(range(len(METHODS)), [TITLES[method] for method in METHODS])
            ax.set_xlim(-0.5, len(METHODS) - 0.5)
            ax.set_title(column.dataset, fontsize=10)
            ax.set_ylabel(_unit(column), fontsize=8)
            ax.grid(axis="y", alpha=0.3)
        axes[0][0].figure.supxlabel("● ours   ◇ paper", fontsize=9)


def draw_scatter(path: Path, columns: Sequence[Column], points: Mapping[Place, Sequence[Mapping[str, Any]]]) -> None:
    """A panel per dataset: the result of every run against its learning rate. Runs without one are crosses below."""
    with figure(path, 1, len(columns), 3.6, 3.0) as axes:
        for ax, column in zip(axes[0], columns, strict=True):
            for method in METHODS:
                pairs = [(point["lr"], point["test"]) for point in points[column.key, method]]
                known = [pair for pair in pairs if math.isfinite(pair[1])]
                lost = [lr for lr, test in pairs if not math.isfinite(test)]
                ax.plot(*zip(*known, strict=True), "o", color=COLORS[method], label=TITLES[method]) if known else None
                ax.plot(lost, [0.02] * len(lost), "x", color=COLORS[method], transform=ax.get_xaxis_transform())
            ax.set_xscale("log")
            ax.set_title(column.dataset, fontsize=10)
            ax.set_xlabel("learning rate")
            ax.set_ylabel(_unit(column), fontsize=8)
            ax.grid(alpha=0.3)
        axes[0][0].legend(fontsize=8)


def draw_clock(
    path: Path, columns: Sequence[Column], curves: Mapping[Place, Sequence[Mapping[str, list[float]]]]
) -> None:
    """Training loss above, test result below, against seconds; a line per seed."""
    with figure(path, 2, len(columns), 3.6, 2.6) as axes:
        for i, column in enumerate(columns):
            for method in METHODS:
                for k, curve in enumerate(curves[column.key, method]):
                    style = {"color": COLORS[method], "lw": 1.2, "label": TITLES[method] if k == 0 else None}
                    axes[0][i].plot(curve["seconds"], curve["loss"], **style)
                    values = [-value if column.by_loss else 100 * value for value in curve["test"]]
                    axes[1][i].plot(curve["epoch_seconds"], values, marker="o", ms=3, **style)
            axes[0][i].set_title(column.dataset, fontsize=10)
            axes[1][i].set_ylabel(_unit(column), fontsize=8)
            axes[1][i].set_xlabel("seconds of training")
            for line in (0, 1):
                axes[line][i].grid(alpha=0.3)
        axes[0][0].set_ylabel("training loss", fontsize=8)
        axes[0][0].legend(fontsize=8)


def draw_horizons(
    path: Path,
    fixed: Mapping[float, tuple[float, float]],
    learned: Sequence[tuple[str, str, str, Sequence[Sequence[float]]]],
) -> None:
    """Left: time and accuracy against a fixed T. Right: T after every step, by title, style, optimizer and seeds."""
    with figure(path, 1, 2, 4.4, 3.2) as axes:
        left, right = axes[0]
        T = sorted(fixed)
        left.plot(T, [fixed[t][0] for t in T], "o-", color=COLORS["sgdm"])
        left.set_xlabel("T, fixed")
        left.set_ylabel("train time, % of T = 1", color=COLORS["sgdm"])
        other = left.twinx()
        other.plot(T, [fixed[t][1] for t in T], "s-", color=COLORS["ocnopt"])
        other.set_ylabel("test accuracy %", color=COLORS["ocnopt"])
        titles: set[str] = set()  # from wherever T begins, it is the same method
        for title, style, optimizer, paths in learned:
            for k, values in enumerate(paths):
                right.plot(
                    range(1, len(values) + 1),
                    values,
                    style,
                    color=COLORS[optimizer],
                    alpha=0.7 if k else 1.0,
                    label=None if title in titles else title,
                )
                titles.add(title)
        right.set_xlabel("step")
        right.set_ylabel("T, learned")
        right.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(titles))
        for ax in (left, right):
            ax.grid(alpha=0.3)


def draw_samples(path: Path, panels: Mapping[str, Any], limit: float = 1.5) -> None:
    """Points of the plane, ``[N, 2]``, one panel a title."""
    with figure(path, 1, len(panels), 3.0, 3.0) as axes:
        for ax, (title, points) in zip(axes[0], panels.items(), strict=True):
            ax.plot(points[:, 0], points[:, 1], ".", ms=1.5, color="#333333")
            ax.set_xlim(-limit, limit)
            ax.set_ylim(-limit, limit)
            ax.set_aspect("equal")
            ax.set_title(title, fontsize=10)

"""The charts of one task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ocnopt.lab.report.chart import Axis, Dot, Ids, Series, line_chart
from ocnopt.lab.report.curves import Against, Curve, loss_curve, test_curve
from ocnopt.lab.report.grouping import HIGHER_IS_BETTER, Cell, Entry, Measure, Task, score
from ocnopt.lab.report.markup import Markup
from ocnopt.lab.report.scales import domain
from ocnopt.lab.report.summary import BOUNDS, NAMES, value_text
from ocnopt.lab.report.text import rate, significant

#: A run that blows up would flatten all others: losses above this multiple of the first ones are not shown.
BLOW_UP = 3.0


class Drawn(NamedTuple):
    entry: Entry
    curve: Curve


class Unit(NamedTuple):
    label: str
    size: float  # in seconds


def figures(task: Task, ids: Ids) -> list[Markup]:
    """Loss and accuracy against steps and against time, then accuracy against the learning rate."""
    directions: tuple[Against, ...] = ("step", "seconds")
    charts = [draw(task, against, ids) for against in directions for draw in (_losses, _tests)]
    return [chart for chart in (*charts, _rates(task, ids)) if chart is not None]


def _score_axis(measure: Measure, bounds: tuple[float, float]) -> Axis:
    low, high = BOUNDS.get(measure, bounds)
    bounds = max(bounds[0], low), min(bounds[1], high)
    if measure in HIGHER_IS_BETTER:
        return Axis(NAMES[measure], text=lambda value: f"{100 * value:.4g} %", bounds=bounds)
    return Axis(NAMES[measure], bounds=bounds)


def _rates(task: Task, ids: Ids) -> Markup | None:
    """Every run a dot, their mean a line."""
    series = [line for line in (_rate_series(entry, task.measure) for entry in task.entries) if line.x]
    if len(task.rates) < 2 or not series:
        return None
    title = f"{NAMES[task.measure].capitalize()} against learning rate"
    bounds = domain([value for line in series for value in line.extent()[1]], log=False, margin=0.05)
    return line_chart(title, Axis("learning rate", log=True), _score_axis(task.measure, bounds), series, ids, "rates")


def _rate_series(entry: Entry, measure: Measure) -> Series:
    cells = [cell for cell in entry.by_rate.values() if cell.lr > 0 and math.isfinite(cell.score.mean)]
    dots = [(run.diverged, _dot(entry, cell, i)) for cell in cells for i, run in enumerate(cell.runs)]
    return Series(
        entry.method.index,
        entry.method.label,
        [cell.lr for cell in cells],
        [cell.score.mean for cell in cells],
        [min(cell.score.values) for cell in cells],
        [max(cell.score.values) for cell in cells],
        [dot for diverged, dot in dots if not diverged and math.isfinite(dot.y)],
        [dot for diverged, dot in dots if diverged and math.isfinite(dot.y)],
        f"best {value_text(entry.best.score.mean, measure)} at learning rate {rate(entry.best.lr)}",
    )


def _dot(entry: Entry, cell: Cell, i: int) -> Dot:
    run = cell.runs[i]
    value = score(run, cell.measure) if run.status != "unfinished" else math.nan
    shown = value_text(value, cell.measure)
    return Dot(cell.lr, value, f"{entry.method.label}, learning rate {rate(cell.lr)}, seed {run.seed}: {shown}")


def _losses(task: Task, against: Against, ids: Ids) -> Markup | None:
    drawn = [Drawn(entry, loss_curve(entry.best.runs, against)) for entry in task.entries]
    drawn = [pair for pair in drawn if pair.curve.x]
    if not drawn:
        return None
    log = all(min(curve.low) > 0 for _, curve in drawn)
    y = Axis("training loss", log=log, bounds=_loss_bounds([curve for _, curve in drawn], log=log))
    return _curves(f"Training loss against {_words(against)}", drawn, against, y, "train_loss", ids)


def _tests(task: Task, against: Against, ids: Ids) -> Markup | None:
    measure: Measure = "accuracy" if task.measure == "accuracy" else "test_loss"
    drawn = [Drawn(entry, test_curve(entry.best.runs, measure, against)) for entry in task.entries]
    drawn = [pair for pair in drawn if pair.curve.x]
    if not drawn:
        return None
    title = f"{NAMES[measure].capitalize()} against {_words(against)}"
    axis = _score_axis(measure, _late_bounds([curve for _, curve in drawn]))
    return _curves(title, drawn, against, axis, measure, ids)


def _curves(title: str, drawn: Sequence[Drawn], against: Against, y: Axis, measure: Measure, ids: Ids) -> Markup:
    unit = _unit(against, max(max(curve.x) for _, curve in drawn))
    series = [
        Series(
            entry.method.index,
            entry.method.label,
            [x / unit.size for x in curve.x],
            curve.mean,
            curve.low,
            curve.high,
            crosses=[Dot(x / unit.size, y, f"{entry.method.label}: a run diverged here") for x, y in curve.lost],
            end=f"{value_text(curve.mean[-1], measure)} after {significant(curve.x[-1] / unit.size)} {unit.label}",
        )
        for entry, curve in drawn
    ]
    end = max(max(line.x) for line in series)
    return line_chart(title, Axis(unit.label, bounds=(0, 1.02 * end or 1)), y, series, ids)


def _words(against: Against) -> str:
    return "steps" if against == "step" else "wall-clock time"


def _unit(against: Against, longest: float) -> Unit:
    if against == "step":
        return Unit("steps", 1)
    if longest < 180:
        return Unit("seconds", 1)
    return Unit("minutes", 60) if longest < 3 * 3600 else Unit("hours", 3600)


def _loss_bounds(curves: Sequence[Curve], *, log: bool) -> tuple[float, float]:
    """The range of the curves, without what lies far above where all of them began."""
    low, high = min(min(curve.low) for curve in curves), max(max(curve.high) for curve in curves)
    first = max(curve.high[0] for curve in curves)
    cap = BLOW_UP * first if log else first + BLOW_UP * (first - low)
    return domain([low, min(high, max(cap, low))], log=log)


def _late_bounds(curves: Sequence[Curve]) -> tuple[float, float]:
    """The range of the second halves: the first epochs come from far below and would flatten what follows."""
    late = [value for curve in curves for side in (curve.low, curve.high) for value in side[len(side) // 2 :]]
    return domain(late, log=False)

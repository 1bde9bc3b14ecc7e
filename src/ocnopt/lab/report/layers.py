"""What the feedback did, layer by layer: one row of small charts for each layer, one column for each quantity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ocnopt.lab.report.grouping import Entry
from ocnopt.lab.report.markup import Markup, element, number
from ocnopt.lab.report.palette import hue
from ocnopt.lab.report.reading import LayerState, Run
from ocnopt.lab.report.scales import Scale, domain
from ocnopt.lab.report.summary import column
from ocnopt.lab.report.text import count, rate, significant

WIDTH, HEIGHT = 150, 40
MARGIN = 3


@dataclass(frozen=True)
class Quantity:
    """A column: one value for each layer and step, or a range of values."""

    title: str
    note: str
    low: str  # attribute of LayerState
    high: str
    guides: tuple[float, ...] = ()
    logarithmic: bool = False
    absent: str | None = None  # said instead of a column of zeros

    def values(self, states: Sequence[LayerState]) -> list[tuple[float, float]]:
        return [(getattr(state, self.low), getattr(state, self.high)) for state in states]


QUANTITIES = (
    Quantity("trace K", "how far the layer alone would move the loss", "trace", "trace", logarithmic=True),
    Quantity("w", "weights of the samples; 1 is plain descent", "w_min", "w_max", guides=(0.0, 1.0)),
    Quantity("s", "change of the loss by the layers before", "s", "s", guides=(0.0,)),
    Quantity("clamped", "weights moved back into [0, 1]", "clamped", "clamped", absent="no weight was clamped"),
    Quantity(
        "projections",
        "eigenvalues cut to keep the value convex",
        "projections",
        "projections",
        absent="no eigenvalue was cut",
    ),
)


@dataclass(frozen=True)
class History:
    """One layer over the training."""

    name: str
    steps: tuple[int, ...]
    states: tuple[LayerState, ...]


@dataclass(frozen=True)
class Column:
    """A quantity with the scales that all layers share."""

    quantity: Quantity
    x: Scale
    y: Scale

    @property
    def extent(self) -> str:
        log = ", log" if self.y.log else ""
        return f"{significant(self.y.low, 2)} … {significant(self.y.high, 2)}{log}"


def layer_section(entry: Entry) -> Markup | None:
    """The feedback in one run of the best learning rate; ``None`` where the method has none to show."""
    run = next((run for run in sorted(entry.best.runs, key=_preference) if run.layers), None)
    if run is None:
        return None
    layers = histories(run)
    columns, silent = _columns(layers)
    steps = f"steps {layers[0].steps[0]} to {layers[0].steps[-1]}"
    about = (
        f"{count(len(layers), 'layer')}, {steps}, from left to right; learning rate {rate(run.lr)}, seed {run.seed}."
    )
    quiet = f" In this run {' and '.join(silent)}." if silent else ""
    scale = "Layers share the scale of a column; the number is the last value."
    head = element(
        "tr", element("th", "Layer", scope="col", role="columnheader"), [_head(c) for c in columns], role="row"
    )
    rows = [_row(layer, columns, entry.method.index) for layer in layers]
    table = element(
        "table",
        element("caption", f"{about}{quiet} {scale}"),
        element("thead", head, role="rowgroup"),
        element("tbody", rows, role="rowgroup"),
        class_="layers cards",
        role="table",
    )
    return element("section", element("h4", entry.method.label), table)


def _preference(run: Run) -> tuple[bool, bool]:
    return run.diverged, not run.finished


def histories(run: Run) -> list[History]:
    """In the order of the network, which is that of the records."""
    names = dict.fromkeys(name for _, states in run.layers for name in states)
    found = []
    for name in names:
        present = [(step, states[name]) for step, states in run.layers if name in states]
        found.append(History(name, tuple(step for step, _ in present), tuple(state for _, state in present)))
    return found


def _columns(layers: Sequence[History]) -> tuple[list[Column], list[str]]:
    """The quantities that have something to show, and a remark for each that has not."""
    columns, silent = [], []
    first, last = min(layer.steps[0] for layer in layers), max(layer.steps[-1] for layer in layers)
    x = Scale(first, last if last > first else first + 1, MARGIN, WIDTH - MARGIN)
    for quantity in QUANTITIES:
        ends = [end for layer in layers for pair in quantity.values(layer.states) for end in pair if math.isfinite(end)]
        if quantity.absent is not None and not any(ends):
            silent.append(quantity.absent)
        elif ends:
            log = quantity.logarithmic and min(ends) > 0
            low, high = domain([*ends, *quantity.guides], log=log, margin=0.0)
            columns.append(Column(quantity, x, Scale(low, high, HEIGHT - MARGIN, MARGIN, log)))
    return columns, silent


def _head(shown: Column) -> Markup:
    return column(shown.quantity.title, shown.quantity.note, shown.extent)


def _row(layer: History, columns: Sequence[Column], index: int) -> Markup:
    cells = [_cell(layer, shown, index) for shown in columns]
    return element("tr", element("th", layer.name, scope="row", role="rowheader"), cells, role="row")


def _cell(layer: History, shown: Column, index: int) -> Markup:
    values = shown.quantity.values(layer.states)
    points = [(step, *pair) for step, pair in zip(layer.steps, values, strict=True) if all(map(math.isfinite, pair))]
    last = _last_text(points[-1][1:]) if points else "no number"
    label = f"{shown.quantity.title} of {layer.name}: {last} at the end"
    drawing = element(
        "svg",
        element("title", label),
        [element("path", d=f"M0 {number(shown.y(g))}H{WIDTH}", class_="grid") for g in shown.quantity.guides],
        _spark(points, shown),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        class_=f"spark {hue(index)}",
    )
    pair = element("div", drawing, element("span", last, class_="last"))
    return element("td", pair, data_label=shown.quantity.title, role="cell")


def _last_text(pair: Sequence[float]) -> str:
    low, high = (significant(value) for value in pair)
    return low if low == high else f"{low} … {high}"


def _spark(points: Sequence[tuple[int, float, float]], shown: Column) -> list[Markup]:
    """A line, or the area between two; the last value is a dot or a bar."""
    if not points:
        return []
    upper = [(shown.x(step), shown.y(high)) for step, _, high in points]
    lower = [(shown.x(step), shown.y(low)) for step, low, _ in points]
    (x, top), (_, bottom) = upper[-1], lower[-1]
    marks = [element("path", d=_path(upper))]
    if lower != upper:
        marks += [element("path", d=_path(upper + lower[::-1]) + "Z", class_="band"), element("path", d=_path(lower))]
    if bottom - top > 1:
        return [*marks, element("path", d=f"M{number(x)} {number(top)}V{number(bottom)}", class_="bar")]
    return [*marks, element("circle", cx=x, cy=top, r=2.2)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)

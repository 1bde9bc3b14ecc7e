"""Line charts in SVG. Colours come from the style sheet, so that one drawing serves light, dark and print."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ocnopt.lab.report.markup import Markup, element, number
from ocnopt.lab.report.palette import dash, hue
from ocnopt.lab.report.scales import Scale, domain, tick_text
from ocnopt.lab.report.text import brief, wrapped

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 420, 46, 130, 10, 40
PLOT_HEIGHT = 210
LINE = 13.5  # height of a line of text in the margin
LABEL_LENGTH, LABEL_LINES = 13, 2  # what fits there


@dataclass(frozen=True)
class Axis:
    label: str
    log: bool = False
    text: Callable[[float], str] = tick_text
    bounds: tuple[float, float] | None = None  # nothing beyond them is shown


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    title: str


@dataclass(frozen=True)
class Series:
    """One method. Coordinates are finite, and positive on a logarithmic axis."""

    index: int
    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dots: Sequence[Dot] = ()
    crosses: Sequence[Dot] = ()
    end: str = ""  # the last value in words, for those who cannot see the line

    def extent(self) -> tuple[list[float], list[float]]:
        marks = (*self.dots, *self.crosses)
        return [*self.x, *(m.x for m in marks)], [*self.y, *self.low, *self.high, *(m.y for m in marks)]


@dataclass
class Ids:
    """Names of elements, unique in the page."""

    counter: itertools.count[int] = field(default_factory=itertools.count)

    def __call__(self) -> str:
        return f"c{next(self.counter)}"


def line_chart(title: str, x: Axis, y: Axis, series: Sequence[Series], ids: Ids, kind: str = "") -> Markup:
    """A figure with one line for each series, named in the right margin in the order in which the lines end."""
    labels = [wrapped(brief(s.label), LABEL_LENGTH, LABEL_LINES) for s in series]
    height = max(PLOT_HEIGHT, LINE * sum(map(len, labels)))
    frame = _scale(x, [v for s in series for v in s.extent()[0]], LEFT, WIDTH - RIGHT, 0.02)
    upright = _scale(y, [v for s in series for v in s.extent()[1]], TOP + height, TOP, 0.05)
    name = ids()
    clip = f"{name}-clip"
    drawing = element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", _description(x, y, series), id=f"{name}-desc"),
        _clip(clip, height),
        _grid(frame, upright, x, y, height),
        element("g", [_bands(s, frame, upright) for s in series], clip_path=f"url(#{clip})"),
        [_line(s, frame, upright, clip) for s in reversed(series)],  # the first one on top
        _names(series, labels, upright, height),
        viewBox=f"0 0 {WIDTH} {TOP + height + BOTTOM}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )
    return element("figure", element("figcaption", title), drawing, class_=f"chart {kind}".strip())


def _scale(axis: Axis, values: Sequence[float], start: float, stop: float, margin: float) -> Scale:
    low, high = axis.bounds or domain(values, log=axis.log, margin=margin)
    return Scale(low, high, start, stop, axis.log)


def _description(x: Axis, y: Axis, series: Sequence[Series]) -> str:
    ends = "; ".join(f"{s.label}: {s.end}" for s in series if s.end)
    return f"{y.label} against {x.label}. {ends}."


def _clip(name: str, height: float) -> Markup:
    # Half a line width beyond the frame: a curve along the edge is not cut in half.
    box = element("rect", x=LEFT - 1, y=TOP - 2, width=WIDTH - RIGHT - LEFT + 2, height=height + 4)
    return element("clipPath", box, id=name)


def _grid(frame: Scale, upright: Scale, x: Axis, y: Axis, height: float) -> Markup:
    right, bottom = WIDTH - RIGHT, TOP + height
    rows = [
        (
            element("line", x1=LEFT, x2=right, y1=upright(tick), y2=upright(tick), class_="grid"),
            element("text", y.text(tick), x=LEFT - 5, y=upright(tick) + 4, class_="tick end"),
        )
        for tick in upright.ticks(4)
    ]
    columns = [
        (
            element("line", x1=frame(tick), x2=frame(tick), y1=bottom, y2=bottom + 4, class_="axis"),
            element("text", x.text(tick), x=frame(tick), y=bottom + 16, class_="tick middle"),
        )
        for tick in frame.ticks(4)
    ]
    base = element("line", x1=LEFT, x2=right, y1=bottom, y2=bottom, class_="axis")
    label = element("text", x.label, x=(LEFT + right) / 2, y=bottom + 33, class_="label middle")
    return element("g", rows, base, columns, label, aria_hidden="true")


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)


def _bands(series: Series, frame: Scale, upright: Scale) -> Markup | None:
    if not series.low or all(low == high for low, high in zip(series.low, series.high, strict=True)):
        return None
    xs = [frame(x) for x in series.x]
    upper = list(zip(xs, map(upright.clipped, series.high), strict=True))
    lower = list(zip(xs, map(upright.clipped, series.low), strict=True))
    return element("path", d=_path(upper + lower[::-1]) + "Z", class_=f"band {hue(series.index)}")


def _line(series: Series, frame: Scale, upright: Scale, clip: str) -> Markup:
    # Lines are cut at the frame, not bent along it; beyond ten heights a browser need not draw them.
    reach = 10 * abs(upright.start - upright.stop)
    points = [(frame(x), min(max(upright(y), -reach), reach)) for x, y in zip(series.x, series.y, strict=True)]
    path = element("path", d=_path(points), stroke_dasharray=dash(series.index)) if len(points) > 1 else None
    return element(
        "g",
        element("title", series.label),
        element("g", path, clip_path=f"url(#{clip})"),
        [_dot(d.title, frame(d.x), upright.clipped(d.y)) for d in series.dots],
        _dot(f"{series.label}: {series.end}", points[-1][0], upright.clipped(series.y[-1])) if points else None,
        [_cross(c.title, frame(c.x), upright.clipped(c.y)) for c in series.crosses],
        class_=f"series {hue(series.index)}",
    )


def _dot(title: str, x: float, y: float) -> Markup:
    return element("circle", element("title", title), cx=x, cy=y, r=2.5)


def _cross(title: str, x: float, y: float) -> Markup:
    d = f"M{number(x - 4)} {number(y - 4)}l8 8m0 -8l-8 8"
    return element("path", element("title", title), d=d, class_="cross")


def _names(series: Sequence[Series], labels: Sequence[list[str]], upright: Scale, height: float) -> Markup:
    """The label of each series, as near to its end as the others allow."""
    ends = [upright.clipped(s.y[-1]) for s in series]
    places = spread_out(ends, [LINE * len(lines) for lines in labels], TOP, TOP + height)
    named = zip(series, labels, places, strict=True)
    return element("g", [_name(s, lines, place) for s, lines, place in named], aria_hidden="true")


def _name(series: Series, lines: Sequence[str], place: float) -> Markup:
    x = WIDTH - RIGHT + 8
    first = place + 4 - LINE * (len(lines) - 1) / 2
    return element(
        "g",
        element("title", series.label),
        element("path", d=f"M{x} {number(place)}h20", stroke_dasharray=dash(series.index)),
        [element("text", line, x=x + 25, y=first + LINE * i) for i, line in enumerate(lines)],
        class_=f"name {hue(series.index)}",
    )


def spread_out(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Centres near the wanted ones and in the same order, so that things of these sizes fit in without overlap."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = list(wanted)
    edge = low
    for i in order:
        places[i] = max(places[i], edge + sizes[i] / 2)
        edge = places[i] + sizes[i] / 2
    edge = high
    for i in reversed(order):
        places[i] = min(places[i], edge - sizes[i] / 2)
        edge = places[i] - sizes[i] / 2
    return places

"""A game as text and as a picture: one row a stage, players in boxes, the live edges between them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ocnopt.games.game import Game

_ROW, _BOX, _LETTER, _GAP, _MARGIN, _LABELS = 74, 30, 7.4, 18, 24, 66
_COLOURS = {"box": "#3b6ea8", "skip": "#b8651b", "merge": "#6b7685", "edge": "#8a94a3", "text": "#5b6573"}


def draw(game: Game, path: str | PathLike[str] | None = None) -> str:
    """Returns the text; writes the picture if there is a path."""
    if path is not None:
        kind = Path(path).suffix.lower()
        if kind not in (".svg", ".png"):
            raise ValueError(f"path must end in .svg or .png, got {str(path)!r}")
        picture = _Picture(game)
        if kind == ".svg":
            Path(path).write_text(picture.svg(), encoding="utf-8")
        else:
            picture.png(path)
    return text(game)


def text(game: Game) -> str:
    lines = []
    for k, stage in enumerate(game.stages):
        readers: dict[str, list[str]] = {}
        for source, reader in stage.state:
            readers.setdefault(source, []).append(reader)
        state = ", ".join(f"{source} → {' + '.join(dict.fromkeys(into))}" for source, into in readers.items())
        lines.append(f"stage {k:>3}  {', '.join(stage.players) or '(operations only)'}")
        lines.append(f"           on {state or 'the input'}")
    for branch in game.branches:
        late = game.late[branch.name]
        lines.append(f"{branch.name} may be late by up to {branch.slack} and is late by {late}")
    return "\n".join(lines)


@dataclass
class _Box:
    label: str
    row: float  # the stage; operations at which paths meet stand half a row lower
    kind: str
    width: float = 0.0
    x: float = 0.0

    @property
    def height(self) -> float:
        return _BOX / 2 if self.kind == "merge" else _BOX

    @property
    def y(self) -> float:
        return _MARGIN + _ROW * self.row + _BOX / 2


class _Picture:
    """Where everything is, before it is drawn one way or the other."""

    def __init__(self, game: Game) -> None:
        self.boxes, self.arrows = _wiring(game)
        self.boxes[None] = _Box("output", game.round.placement.count, "box")
        rows: dict[float, list[_Box]] = defaultdict(list)
        for box in self.boxes.values():
            box.width = _LETTER * len(box.label) + (10 if box.kind == "merge" else 18)
            rows[box.row].append(box)
        for row in rows.values():
            x = -(sum(box.width for box in row) + _GAP * (len(row) - 1)) / 2
            for box in row:
                box.x, x = x + box.width / 2, x + box.width + _GAP
        self.lines = [self._line(self.boxes[u], self.boxes[v]) for u, v in self.arrows]
        left = min(box.x - box.width / 2 for box in self.boxes.values())
        right = max(max(x for x, _ in line) for line in self.lines) if self.lines else 0.0
        right = max(right, *(box.x + box.width / 2 for box in self.boxes.values()))
        shift = _MARGIN + _LABELS - left
        for box in self.boxes.values():
            box.x += shift
        self.lines = [[(x + shift, y) for x, y in line] for line in self.lines]
        self.width, self.height = right + shift + _MARGIN, 2 * _MARGIN + _ROW * game.round.placement.count + _BOX
        self.stages = [(f"stage {k}", _MARGIN + _ROW * k + _BOX / 2) for k in range(game.round.placement.count)]

    def _line(self, a: _Box, b: _Box) -> list[tuple[float, float]]:
        """The four points of a curve from the lower edge of a box to the upper edge of another, around what stands
        between them.
        """
        y0, y1 = a.y + a.height / 2, b.y - b.height / 2
        between = [box for box in self.boxes.values() if a.row < box.row < b.row and box is not b]
        edges = [box.x + box.width / 2 for box in between if box.kind != "merge" or box.row + 0.5 < b.row]
        lane = max(edges, default=None)
        if lane is None or max(a.x, b.x) > lane + 10:
            bend = max(y1 - y0, 20) / 2
            return [(a.x, y0), (a.x, y0 + bend), (b.x, y1 - bend), (b.x, y1)]
        lane = lane + 14 + 2.0 * (b.row - a.row)
        # a cubic curve comes three quarters of the way to its control points
        return [(a.x, y0), (a.x + (lane - a.x) * 4 / 3, y0 + 12), (b.x + (lane - b.x) * 4 / 3, y1 - 12), (b.x, y1)]

    def svg(self) -> str:
        size = f'width="{self.width:.0f}" height="{self.height:.0f}" viewBox="0 0 {self.width:.0f} {self.height:.0f}"'
        out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
        out.append(
            f'<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
            f'<path d="M0,0 L7,3 L0,6 Z" fill="{_COLOURS["edge"]}"/></marker></defs>'
        )
        for line in self.lines:
            start, *rest = (f"{x:.0f},{y:.0f}" for x, y in line)
            out.append(
                f'<path d="M{start} C{" ".join(rest)}" fill="none" stroke="{_COLOURS["edge"]}" marker-end="url(#tip)"/>'
            )
        for b in self.boxes.values():
            out.append(
                f'<rect x="{b.x - b.width / 2:.0f}" y="{b.y - b.height / 2:.0f}" width="{b.width:.0f}" '
                f'height="{b.height:.0f}" rx="6" fill="{_COLOURS[b.kind]}"/><text x="{b.x:.0f}" y="{b.y + 4:.0f}" '
                f'text-anchor="middle" fill="white">{escape(b.label)}</text>'
            )
        for label, y in self.stages:
            out.append(f'<text x="{_MARGIN}" y="{y + 4:.0f}" fill="{_COLOURS["text"]}">{label}</text>')
        return "\n".join([*out, "</svg>\n"])

    def png(self, path: str | PathLike[str]) -> None:
        try:
            from matplotlib.figure import Figure
            from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
            from matplotlib.path import Path as Curve
        except ImportError:
            raise ImportError("a .png needs matplotlib: pip install matplotlib, or write an .svg") from None
        figure = Figure(figsize=(self.width / 96, self.height / 96), dpi=144)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        for line in self.lines:
            curve = Curve(line, [Curve.MOVETO, *[Curve.CURVE4] * 3])
            arrow = FancyArrowPatch(path=curve, arrowstyle="-|>,head_width=2.5,head_length=4", color=_COLOURS["edge"])
            axes.add_patch(arrow).set_zorder(1)
        for b in self.boxes.values():
            corner, colour = (b.x - b.width / 2 + 3, b.y - b.height / 2 + 3), _COLOURS[b.kind]
            shape = FancyBboxPatch(corner, b.width - 6, b.height - 6, boxstyle="round,pad=3", fc=colour, ec="none")
            axes.add_patch(shape).set_zorder(2)
            axes.text(b.x, b.y, b.label, ha="center", va="center", color="white", fontsize=8, zorder=3)
        for label, y in self.stages:
            axes.text(_MARGIN, y, label, va="center", color=_COLOURS["text"], fontsize=8)
        figure.savefig(path)


def _wiring(game: Game) -> tuple[dict[Any, _Box], list[tuple[Any, Any]]]:
    """Boxes for players and for operations at which paths meet, those who join the stage of one in the same box; and
    who reads whom, with nothing else in between.
    """
    flow, stage = game.round.flow, game.round.placement.stage
    moving = {node for branch in game.branches for node in branch.nodes}
    writers: dict[Any, frozenset[Any]] = {}
    boxes: dict[Any, _Box] = {}
    arrows: dict[tuple[Any, Any], None] = {}
    for node in flow.graph.nodes:
        above = frozenset().union(*(writers[n] for n in node.all_input_nodes))
        player = node.op == "call_module" or node.meta.get("parameter")
        if node not in stage or not (player or len(above) > 1):
            writers[node] = above
            continue
        beside = [writer for writer in above if boxes[writer].row // 1 == stage[node]]
        if node.op == "call_module" and len(beside) == len(above) == 1:  # it joins the stage: one box for both
            boxes[beside[0]].label += f" · {node.target}"
            writers[node] = above
            continue
        if player:
            moves = node in moving or any(user in moving for user in node.users)
            boxes[node] = _Box(str(node.target), stage[node], "skip" if moves else "box")
        else:
            label = getattr(node.target, "__name__", node.name).strip("_")
            boxes[node] = _Box(label, stage[node] + 0.5, "merge")
        arrows |= {(writer, node): None for writer in boxes if writer in above}
        writers[node] = frozenset([node])
    ends = {writer for node in flow.outputs if node is not None for writer in writers[node]}
    return boxes, [*arrows, *((writer, None) for writer in boxes if writer in ends)]

"""A game as text and as a picture: one row a stage, players in boxes, the live edges between them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ocnopt.games.game import Game

_ROW, _BOX, _LETTER, _GAP, _MARGIN = 74, 30, 7.4, 18, 24
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
    x: float
    y: float
    width: float
    height: float
    kind: str


class _Picture:
    """Where everything is, before it is drawn one way or the other."""

    def __init__(self, game: Game) -> None:
        moving = {str(call.target) for branch in game.branches for call in branch.calls}
        rows = [[(name, _LETTER * len(name) + 18) for name in stage.players] for stage in game.stages]
        inner = max((sum(w for _, w in row) + _GAP * (len(row) - 1) for row in rows if row), default=120.0)
        inner = max(inner, 240.0)
        left = _MARGIN + 66  # room for the numbers of the stages
        self.width, self.height = left + inner + _MARGIN, 2 * _MARGIN + _ROW * len(rows) + _BOX
        self.boxes: dict[str, _Box] = {}
        for k, row in enumerate(rows):
            x = left + (inner - sum(w for _, w in row) - _GAP * (len(row) - 1)) / 2
            for name, w in row:
                kind = "skip" if name in moving else "box"
                self.boxes.setdefault(name, _Box(name, x + w / 2, self._y(k), w, _BOX, kind))
                x += w + _GAP
        self.stages = [(f"stage {k}", self._y(k)) for k in range(len(rows))]
        middle = left + inner / 2
        self.boxes["output"] = _Box("output", middle, self._y(len(rows)), _LETTER * 6 + 18, _BOX, "box")
        merges, self.arrows = _wiring(game)
        here: Counter[int] = Counter()
        for key, (label, k) in merges.items():  # beside one another, below the row of their stage
            here[k] += 1
            x = middle + (-1) ** here[k] * (here[k] // 2) * 90
            self.boxes[key] = _Box(label, x, self._y(k) + _ROW / 2, _LETTER * len(label) + 10, _BOX / 2, "merge")

    @staticmethod
    def _y(k: int) -> float:
        return _MARGIN + _ROW * k + _BOX / 2

    @property
    def lines(self) -> list[tuple[float, float, float, float]]:
        """From the lower edge of a box to the upper edge of another."""
        ends = [(self.boxes[a], self.boxes[b]) for a, b in self.arrows if a in self.boxes and b in self.boxes]
        return [(a.x, a.y + a.height / 2, b.x, b.y - b.height / 2) for a, b in ends]

    def svg(self) -> str:
        size = f'width="{self.width:.0f}" height="{self.height:.0f}" viewBox="0 0 {self.width:.0f} {self.height:.0f}"'
        out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
        out.append(
            f'<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
            f'<path d="M0,0 L7,3 L0,6 Z" fill="{_COLOURS["edge"]}"/></marker></defs>'
        )
        for x0, y0, x1, y1 in self.lines:
            bend = max(y1 - y0, 20) / 2
            out.append(
                f'<path d="M{x0:.0f},{y0:.0f} C{x0:.0f},{y0 + bend:.0f} {x1:.0f},{y1 - bend:.0f} {x1:.0f},{y1:.0f}" '
                f'fill="none" stroke="{_COLOURS["edge"]}" marker-end="url(#tip)"/>'
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
            from matplotlib.patches import FancyBboxPatch
        except ImportError:
            raise ImportError("a .png needs matplotlib: pip install matplotlib, or write an .svg") from None
        figure = Figure(figsize=(self.width / 96, self.height / 96), dpi=144)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set(xlim=(0, self.width), ylim=(self.height, 0))
        axes.axis("off")
        style = {"arrowstyle": "-|>", "color": _COLOURS["edge"], "connectionstyle": "arc3,rad=0.08"}
        for x0, y0, x1, y1 in self.lines:
            axes.annotate("", (x1, y1), (x0, y0), arrowprops=style, zorder=1)
        for b in self.boxes.values():
            corner, colour = (b.x - b.width / 2 + 3, b.y - b.height / 2 + 3), _COLOURS[b.kind]
            shape = FancyBboxPatch(corner, b.width - 6, b.height - 6, boxstyle="round,pad=3", fc=colour, ec="none")
            axes.add_patch(shape).set_zorder(2)
            axes.text(b.x, b.y, b.label, ha="center", va="center", color="white", fontsize=8, zorder=3)
        for label, y in self.stages:
            axes.text(_MARGIN, y, label, va="center", color=_COLOURS["text"], fontsize=8)
        figure.savefig(path)


def _wiring(game: Game) -> tuple[dict[str, tuple[str, int]], list[tuple[str, str]]]:
    """Operations at which paths meet, with their stages; and who reads whom, with nothing else in between."""
    flow, stage = game.round.flow, game.round.placement.stage
    writers: dict[object, frozenset[str]] = {}
    merges: dict[str, tuple[str, int]] = {}
    arrows: dict[tuple[str, str], None] = {}
    for node in flow.graph.nodes:
        above = frozenset().union(*(writers[n] for n in node.all_input_nodes))
        if node.op == "call_module" or node.meta.get("parameter"):
            key = str(node.target)
        elif len(above) > 1:
            key = f"operation {node.name}"
            merges[key] = getattr(node.target, "__name__", node.name).strip("_"), stage[node]
        else:
            writers[node] = above
            continue
        arrows |= {(writer, key): None for writer in sorted(above)}
        writers[node] = frozenset([key])
    ends = sorted({writer for node in flow.outputs if node is not None for writer in writers[node]})
    return merges, [*arrows, *((writer, "output") for writer in ends)]

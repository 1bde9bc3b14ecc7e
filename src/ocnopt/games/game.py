"""The game that the layers play: what ``optimizer.game`` is."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Any

from torch import nn

from ocnopt.capture import Tape
from ocnopt.games.alignment import Aligner, Alignment
from ocnopt.games.bandit import Bandit
from ocnopt.games.edges import Edges
from ocnopt.games.flow import Flow, name_of
from ocnopt.games.program import Program
from ocnopt.games.schedule import Branch, Placement, Schedule
from ocnopt.games.trace import record
from ocnopt.layers.registry import joining
from ocnopt.records import Rollout


@dataclass(frozen=True)
class Stage:
    """Players that act on the same state."""

    players: tuple[str, ...]
    state: tuple[tuple[str, str], ...]  #: the live edges: who wrote, and who is going to read


@dataclass
class Round:
    """The placement of one step, and what follows from it."""

    flow: Flow
    schedule: Schedule
    placement: Placement
    late: dict[str, int]
    edges: Edges = field(init=False)

    def __post_init__(self) -> None:
        self.edges = Edges(self.flow, self.placement)
        self._program: Program | None = None

    @property
    def program(self) -> Program:
        """How to run it. Numbers in the code may be others than they were."""
        if self._program is None or self._program.entries is not self.flow.entries:
            self._program = Program(self.flow, self.placement)
        return self._program

    @cached_property
    def anywhere(self) -> Edges:
        """Those that may be live in another round, too, where branches move from step to step."""
        ends = [{}, {branch.name: branch.slack for branch in self.schedule.branches}]
        return Edges(self.flow, self.placement, *map(self.schedule.place, ends))


class Game:
    """Stages, branches and alignment of a network, as far as its data flow is known."""

    def __init__(self, model: nn.Module | None = None, aligner: Aligner | None = None) -> None:
        self.model = model
        self.joining = frozenset() if model is None else joining(model)
        self.aligner = aligner or Aligner()
        self.rules: Mapping[str, Alignment] = {}
        self.tape: Tape | None = None
        self.why_accumulated: str | None = None  #: why the last step did not go by the stages and their live edges
        self._round: Round | None = None

    def arrange(self, flow: Flow, rules: Mapping[str, Alignment]) -> Round:
        """The placement of a step."""
        schedule = self.place(flow, {}).schedule
        self._round = self.place(flow, self.aligner.choose(rules, schedule, self._modules))
        return self._round

    def _modules(self) -> list[str]:
        return [] if self.model is None else [name for name, _ in self.model.named_modules()]

    def place(self, flow: Flow, late: Mapping[str, int]) -> Round:
        """With branches as late as they are said to be. What follows from a data flow is kept with it."""
        rounds: dict[tuple[tuple[str, int], ...], Round] = flow.rounds
        if () not in rounds:
            schedule = Schedule(flow, self.joining)
            rounds[()] = Round(flow, schedule, schedule.place({}), {})
        schedule = rounds[()].schedule
        late = {name: n for name, n in late.items() if n}
        key = tuple(late.items())
        if key not in rounds:
            rounds[key] = Round(flow, schedule, schedule.place(late), late)
        return rounds[key]

    def trace(self, *args: Any, **kwargs: Any) -> Game:
        """Find the data flow by running the model on these inputs, which changes nothing in it."""
        if self.model is None:
            raise RuntimeError("game.trace needs a network: pass model=... to the optimizer, or call attach(model)")
        idle = nullcontext() if self.tape is None else self.tape.following(Rollout())  # its hooks put in views
        with idle:
            flow = record(self.model, args, kwargs)
        if flow.unknown is not None:
            raise RuntimeError(f"the data flow of this network cannot be followed: {flow.unknown}")
        fixed = {prefix: rule for prefix, rule in self.rules.items() if rule.rule not in ("random", "adaptive")}
        self.arrange(flow, fixed)
        return self

    # --- looking at it ---

    @property
    def round(self) -> Round:
        if self._round is None:
            raise RuntimeError(
                "the data flow of the network is not known: call game.trace(inputs), or make a step with "
                "feedback='nonlinear', bellman='paper' or game='noncooperative'"
            )
        return self._round

    @property
    def stages(self) -> list[Stage]:
        """From the network's input to its output, as they were recorded last: by a step, or by :meth:`trace`."""
        this, stage = self.round, self.round.placement.stage
        players: list[dict[str, None]] = [{} for _ in range(this.placement.count)]
        for node, k in stage.items():
            if node.op == "call_module" or node.meta.get("parameter"):
                players[k][str(node.target)] = None
        crossing = [*this.edges.into_players, *this.edges.into_operations]
        ends = [(stage[source], stage[user], (_label(source), _label(user))) for source, user in crossing]
        ends += [(stage[node], this.placement.count, (_label(node), "output")) for _, node in this.edges.into_outputs]
        state = [tuple(edge for a, b, edge in ends if a < k <= b) for k in range(this.placement.count)]
        return [Stage(tuple(names), edges) for names, edges in zip(players, state, strict=True)]

    @property
    def branches(self) -> list[Branch]:
        """The parts of the network that may act later than they need to, and by how much."""
        return self.round.schedule.branches

    @property
    def late(self) -> dict[str, int]:
        """By how many stages each branch was late in the last step."""
        return {branch.name: self.round.late.get(branch.name, 0) for branch in self.branches}

    @property
    def bandits(self) -> dict[str, Bandit]:
        """Of the adaptive alignments, by the prefix that they are for."""
        return self.aligner.bandits

    def draw(self, path: str | PathLike[str] | None = None) -> str:
        """The stages as text; with a path, as a picture too (``.svg``, or ``.png`` with matplotlib)."""
        from ocnopt.games.draw import draw

        return draw(self, path)

    def reward(self, value: float) -> None:
        """What the last alignment was worth, in [0, 1]: for ``alignment="adaptive"``."""
        self.aligner.reward(value)


def _label(node: Any) -> str:
    if node.op == "call_module":
        return name_of(node)
    if node.name.startswith("getitem") and node.args and getattr(node.args[0], "op", "") == "call_module":
        return name_of(node.args[0])
    return str(node.name)

"""Stages of a data flow: which players act on the same state, and which could act later than they need to.

A player acts as early as its input allows (its *first* stage). Between the split and the merge of a block the
shorter branch has time to spare: it may act at any stage up to its *last* one, and each such alignment is another game.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from torch import fx

from ocnopt.games.flow import Flow, name_of


@dataclass(frozen=True)
class Branch:
    """Calls of players that follow one another and have the same time to spare: they move together."""

    name: str
    calls: tuple[fx.Node, ...] = field(repr=False)
    first: int  # the stage of its first call, at the earliest
    slack: int  # by how many stages it may be late


@dataclass
class Placement:
    """A stage for every node of the flow; −1 is known before anybody acts."""

    stage: dict[fx.Node, int]
    count: int

    def nodes(self, flow: Flow) -> list[list[fx.Node]]:
        """The nodes to run at each stage, in the order of the program; what stage −1 computes comes first."""
        by_stage: list[list[fx.Node]] = [[] for _ in range(self.count + 1)]
        for node in flow.graph.nodes:
            by_stage[self.stage[node] + 1].append(node)
        return by_stage


class Schedule:
    """The first and last stage of every call, and the branches that can move."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self._before = _direct_predecessors(flow)
        self.first = self._earliest()
        self.count = max(self.first.values(), default=-1) + 1
        self.last = self._latest()
        self.branches = self._find_branches()

    def place(self, late: Mapping[str, int]) -> Placement:
        """``late``: by how many stages each branch, by name, is later than it need be."""
        delay = {call: late.get(b.name, 0) for b in self.branches for call in b.calls}
        stage: dict[fx.Node, int] = {}
        for call in self.flow.calls:
            wanted = min(self.first[call] + delay.get(call, 0), self.last[call])
            # two branches that read one another may want what the data flow forbids: the reader waits
            stage[call] = max([wanted, *(stage[u] + 1 for u in self._before[call])])
        stage = _with_operations(self.flow, stage)
        return Placement(stage, max(stage.values(), default=-1) + 1)

    def _earliest(self) -> dict[fx.Node, int]:
        first: dict[fx.Node, int] = {}
        for call in self.flow.calls:
            first[call] = max((first[u] + 1 for u in self._before[call]), default=0)
        return first

    def _latest(self) -> dict[fx.Node, int]:
        last = dict.fromkeys(self.flow.calls, self.count - 1)
        for call in reversed(self.flow.calls):
            for u in self._before[call]:
                last[u] = min(last[u], last[call] - 1)
        return last

    def _find_branches(self) -> list[Branch]:
        of_call: dict[fx.Node, list[fx.Node]] = {}
        for call in self.flow.calls:
            if self.last[call] == self.first[call]:
                continue
            before = self._before[call]
            (u,) = before if len(before) == 1 else (None,)
            follows = u in of_call and self._slack(u) == self._slack(call)
            branch = of_call[u] if follows and u is not None else []
            branch.append(call)
            of_call[call] = branch
        branches: dict[str, Branch] = {}
        for b in {id(branch): branch for branch in of_call.values()}.values():
            name = _common_name(b)
            name = name_of(b[0]) if name in branches else name
            branches[name] = Branch(name, tuple(b), self.first[b[0]], self._slack(b[0]))
        return list(branches.values())

    def _slack(self, call: fx.Node) -> int:
        return self.last[call] - self.first[call]


def _direct_predecessors(flow: Flow) -> dict[fx.Node, frozenset[fx.Node]]:
    """The calls whose outputs each node reads, with nothing but operations in between."""
    before: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in flow.graph.nodes:
        sources = (frozenset([n]) if n.op == "call_module" else before[n] for n in node.all_input_nodes)
        before[node] = frozenset().union(*sources)
    return before


def _with_operations(flow: Flow, stage: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Everything else is computed as soon as it can be. A parameter that an operation reads acts when the rest of
    what the operation reads is there.
    """
    stage, free = dict(stage), set()  # free: depends on such parameters alone
    for node in flow.graph.nodes:
        inputs = node.all_input_nodes
        if node.meta.get("parameter") or (node.op == "call_function" and inputs and all(n in free for n in inputs)):
            free.add(node)
        elif node.op != "call_module":
            known = [stage[n] for n in inputs if n not in free]
            mixes = len(known) < len(inputs)
            stage[node] = max([*known, 0 if mixes else -1])
    for node in reversed(flow.graph.nodes):
        if node in free:
            stage[node] = min((stage[user] for user in node.users if user in stage), default=0)
    return stage


def _common_name(calls: Iterable[fx.Node]) -> str:
    names = [name_of(call) for call in calls]
    parts = takewhile(lambda part: len(set(part)) == 1, zip(*(name.split(".") for name in names), strict=False))
    return ".".join(part[0] for part in parts) or names[0]

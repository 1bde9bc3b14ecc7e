"""Stages of a data flow: which players act on the same state, and which could act later than they need to.

A player acts as early as its input allows (its *first* stage). Between the split and the merge of a block the
shorter branch has time to spare: it may act at any stage up to its *last* one, and each such alignment is another game.
A layer that joins others (:attr:`ocnopt.layers.Adapter.joins`) acts together with the latest player before it, whenever
that is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from torch import fx

from ocnopt.games.flow import Flow, name_of


@dataclass(frozen=True)
class Branch:
    """Players that follow one another and have the same time to spare: they move together."""

    name: str
    nodes: tuple[fx.Node, ...] = field(repr=False)
    first: int  # the stage of its first player, at the earliest
    slack: int  # by how many stages it may be late


@dataclass
class Placement:
    """A stage for every node of the flow that anything depends on; −1 is known before anybody acts."""

    stage: dict[fx.Node, int]
    count: int

    def nodes(self, flow: Flow) -> list[list[fx.Node]]:
        """The nodes to run at each stage, in the order of the program; what stage −1 computes comes first."""
        by_stage: list[list[fx.Node]] = [[] for _ in range(self.count + 1)]
        for node in flow.graph.nodes:
            if node in self.stage:
                by_stage[self.stage[node] + 1].append(node)
        return by_stage


class Schedule:
    """The first and last stage of everything that acts, and the branches that can move.

    What acts is a call of a player, or an operation that reads a parameter (or what was made of parameters alone).
    """

    def __init__(self, flow: Flow, joining: Collection[str] = ()) -> None:
        """``joining``: the modules that act in the stage of the player before them."""
        self.flow, self._joining = flow, joining
        self._free = _made_of_parameters(flow)
        self.acting = [n for n in flow.graph.nodes if self._acts(n)]
        self._before = self._direct_predecessors()
        self.first = self._earliest()
        self.count = max(self.first.values(), default=-1) + 1
        self.last = self._latest()
        self.branches = self._find_branches()

    def place(self, late: Mapping[str, int]) -> Placement:
        """``late``: by how many stages each branch, by name, is later than it need be."""
        delay = {node: late.get(b.name, 0) for b in self.branches for node in b.nodes}
        stage: dict[fx.Node, int] = {}
        for node in self.acting:
            wanted = min(self.first[node] + delay.get(node, 0), self.last[node])
            # two branches that read one another may want what the data flow forbids: the reader waits
            stage[node] = max([wanted, *(stage[u] + self._gap(node) for u in self._before[node])])
        return Placement(self._with_the_rest(stage), self.count)

    def _acts(self, node: fx.Node) -> bool:
        if node in self._free or node.op in ("placeholder", "get_attr"):
            return False
        return node.op == "call_module" or any(n in self._free for n in node.all_input_nodes)

    def _follows(self, node: fx.Node) -> bool:
        """Does it act together with a player before it?"""
        return node.op == "call_module" and name_of(node) in self._joining and bool(self._before[node])

    def _gap(self, node: fx.Node) -> int:
        """How many stages it is later than the latest player before it."""
        return 0 if self._follows(node) else 1

    def _direct_predecessors(self) -> dict[fx.Node, frozenset[fx.Node]]:
        """What acts upstream of each node, with nothing that acts in between."""
        before: dict[fx.Node, frozenset[fx.Node]] = {}
        acting = set(self.acting)
        for node in self.flow.graph.nodes:
            sources = (frozenset([n]) if n in acting else before[n] for n in node.all_input_nodes)
            before[node] = frozenset().union(*sources)
        return before

    def _earliest(self) -> dict[fx.Node, int]:
        first: dict[fx.Node, int] = {}
        for node in self.acting:
            first[node] = max((first[u] + self._gap(node) for u in self._before[node]), default=0)
        return first

    def _latest(self) -> dict[fx.Node, int]:
        last = dict.fromkeys(self.acting, self.count - 1)
        for node in reversed(self.acting):
            for u in self._before[node]:
                last[u] = min(last[u], last[node] - self._gap(node))
        for node in filter(self._follows, self.acting):  # whatever time it has itself: it goes where the other goes
            last[node] = max(last[u] for u in self._before[node])
        return last

    def _find_branches(self) -> list[Branch]:
        of_node: dict[fx.Node, list[fx.Node]] = {}
        for node in self.acting:
            if self.last[node] == self.first[node]:
                continue
            before = self._before[node]
            (u,) = before if len(before) == 1 else (None,)
            continues = u in of_node and self._slack(u) == self._slack(node)
            if self._follows(node) and not continues:
                continue  # it moves with others, whoever they are
            branch = of_node[u] if continues and u is not None else []
            branch.append(node)
            of_node[node] = branch
        branches: dict[str, Branch] = {}
        for b in {id(branch): branch for branch in of_node.values()}.values():
            name = _unused(_common_name(map(self.name_of, b)), branches)
            branches[name] = Branch(name, tuple(b), self.first[b[0]], self._slack(b[0]))
        return list(branches.values())

    def _slack(self, node: fx.Node) -> int:
        return self.last[node] - self.first[node]

    def name_of(self, node: fx.Node) -> str:
        """Of the module that a call runs, or of the (first) parameter that an operation reads."""
        while node.op != "call_module" and not node.meta.get("parameter"):
            node = next(n for n in node.all_input_nodes if n in self._free)
        return str(node.target)

    def _with_the_rest(self, stage: dict[fx.Node, int]) -> dict[fx.Node, int]:
        """Operations run as soon as they can. A parameter acts at the first operation that reads it."""
        for node in self.flow.graph.nodes:
            if node not in stage and node not in self._free:
                stage[node] = max((stage[n] for n in node.all_input_nodes), default=-1)
        for node in reversed(self.flow.graph.nodes):
            if node in self._free:
                readers = [stage[user] for user in node.users if user in stage]
                if readers:  # else it is read where nobody sees it, inside a player
                    stage[node] = min(readers)
        return stage


def _made_of_parameters(flow: Flow) -> set[fx.Node]:
    """Parameters, and what depends on them and on nothing else."""
    free: set[fx.Node] = set()
    for node in flow.graph.nodes:
        inputs = node.all_input_nodes
        made = all(n in free for n in inputs) and (bool(inputs) or node.op == "call_module")
        if node.meta.get("parameter") or (node.op in ("call_module", "call_function") and made):
            free.add(node)
    return free


def _common_name(names: Iterable[str]) -> str:
    names = list(names)
    parts = takewhile(lambda part: len(set(part)) == 1, zip(*(name.split(".") for name in names), strict=False))
    return ".".join(part[0] for part in parts) or names[0]


def _unused(name: str, taken: Iterable[str]) -> str:
    """A module may be the skip connection of several blocks."""
    count = sum(other.partition("#")[0] == name for other in taken)
    return name if not count else f"{name}#{count + 1}"

"""The edges of a data flow that are live at some stage: what was computed before it, and is still to be read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from torch import fx

from ocnopt.games.flow import Flow, Overwriting, arguments, name_of
from ocnopt.games.schedule import Placement

#: a node, and one that reads it
Edge = tuple[fx.Node, fx.Node]


class Key(NamedTuple):
    """By which the reading of an edge is known."""

    turn: int  # of the value
    entry: int  # of its reader
    input: int = -1  # which of its inputs, if that is a player


_NONE: set[int] = set()
_NO_KEYS: dict[int, Key] = {}


class Edges:
    """By kind of reader. They depend on the placement alone."""

    def __init__(self, flow: Flow, *placements: Placement) -> None:
        """``placements``: one, or several, and the edges are those of any of them."""
        crossing = [
            (source, user)
            for source in flow.graph.nodes
            if source.meta.get("kind") == "real" and not source.meta.get("parameter")
            for user in source.users
            if any(-1 < stage.get(source, -1) < stage.get(user, -1) for stage in (p.stage for p in placements))
        ]
        self.flow, stage = flow, placements[0].stage
        self.into_players = [edge for edge in crossing if edge[1].op == "call_module"]
        self.into_operations = [edge for edge in crossing if edge[1].op != "call_module"]
        self.into_outputs = [(i, node) for i, node in enumerate(flow.outputs) if node is not None and stage[node] >= 0]
        crossing_players = set(self.into_players)
        #: source, call, which call of which module, and which of its inputs
        self.places_of_players = [
            (node, call, (name_of(call), occurrence), i)
            for call, occurrence in occurrences(flow).items()
            for i, node in enumerate(arguments(call))
            if (node, call) in crossing_players
        ]
        self._of_players = frozenset((*key, i) for _, _, key, i in self.places_of_players)
        self._inputs: dict[tuple[str, int], dict[int, Key]] = defaultdict(dict)
        for source, call, of_call, i in self.places_of_players:
            self._inputs[of_call][i] = key_of(source, call, i)
        self._of_operations: dict[int, set[int]] = defaultdict(set)
        for source, user in self.into_operations:
            self._of_operations[user.meta["entry"]].add(source.meta["turn"])

    @cached_property
    def hidden(self) -> bool:
        """Is anything overwritten that goes along one? Then no alias of it can be made, or it is spoilt when the
        backward pass comes by.
        """
        sources = dict.fromkeys(source for source, _ in (*self.into_players, *self.into_operations))
        return any(_overwrites(user, source) for source in sources for user in source.users)

    def among(self, others: Edges) -> bool:
        """Are these all edges of the same flow that are read, too?"""
        if self is others:
            return True
        if self.flow is not others.flow or not self._of_players <= others._of_players:
            return False
        return all(turns <= others.into_operation(entry) for entry, turns in self._of_operations.items())

    def into_player(self, name: str, occurrence: int) -> Mapping[int, Key]:
        """The inputs of that call that are the ends of some, and by what key their readings are known."""
        return self._inputs.get((name, occurrence), _NO_KEYS)

    def into_operation(self, entry: int) -> set[int]:
        """The values that the operation of an entry reads by one."""
        return self._of_operations.get(entry, _NONE)


def key_of(source: fx.Node, user: fx.Node, *place: int) -> Key:
    return Key(source.meta["turn"], user.meta["entry"], *place)


def _overwrites(user: fx.Node, source: fx.Node) -> bool:
    return isinstance(user.target, Overwriting) and user.target.changed(user) is source


def occurrences(flow: Flow) -> dict[fx.Node, int]:
    """Of each call of a player: which call of the same module it is."""
    counts: dict[str, int] = defaultdict(int)
    found = {}
    for call in flow.calls:
        found[call] = counts[name_of(call)]
        counts[name_of(call)] += 1
    return found

"""A pass of which it is certain what it does: nobody looks at that, and operations at the ends of watched edges are
known by when they come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ocnopt.apart import Unfollowed
from ocnopt.games.edges import Edges, occurrences
from ocnopt.games.expected import Read
from ocnopt.games.flow import Flow, arguments, equal, name_of, values_in
from ocnopt.games.recorder import is_innermost, take_off
from ocnopt.trees import mapped


class Cue(NamedTuple):
    """An operation that is going to read along a watched edge."""

    target: Any
    before: int  # how many calls of the same function come first, since the last player's
    entry: int
    turns: Mapping[int, int]  # of the tensors that it reads so, by their place among its arguments
    alone: frozenset[int]  # those of them that nobody else reads


class Cues:
    """What a pass of a flow is watched for."""

    def __init__(self, flow: Flow, edges: Edges | None, modules: Mapping[str, nn.Module]) -> None:
        self.flow, self.edges = flow, edges
        self.order = [name_of(call) for call in flow.calls]
        self.called = dict.fromkeys(modules[name] for name in self.order)
        self.after = {} if edges is None else _cues(flow, edges)
        alone, calls = _read_once(flow), occurrences(flow)
        self._alone = {
            (name_of(call), occurrence, i)
            for call, occurrence in calls.items()
            for i, node in enumerate(arguments(call))
            if node.meta["turn"] in alone
        }

    def fit(self, flow: Flow, edges: Edges | None) -> bool:
        return self.flow is flow and self.edges is edges

    def alone(self, name: str, occurrence: int, i: int) -> bool:
        """Does nobody else read that input of a call? Then its gradient is that through the edge."""
        return (name, occurrence, i) in self._alone


def _read_once(flow: Flow) -> frozenset[int]:
    """The turns of what is read in one place, and not returned."""
    times = Counter(value.turn for entry in flow.entries for value in values_in((entry.args, entry.kwargs)))
    return frozenset(turn for turn, count in times.items() if count == 1)


def _cues(flow: Flow, edges: Edges) -> dict[int, list[Cue]]:
    """By the number of players that have been called."""
    found: dict[int, list[Cue]] = {}
    calls, counts, alone = 0, Counter[Any](), _read_once(flow)
    for place, entry in enumerate(flow.entries):
        if entry.kind == "player":
            calls, counts = calls + 1, Counter()
        elif entry.kind == "operation":
            if turns := edges.into_operation(place):
                read = enumerate(values_in((entry.args, entry.kwargs)))
                wanted = {i: value.turn for i, value in read if value.turn in turns}
                found.setdefault(calls, []).append(
                    Cue(entry.target, counts[entry.target], place, wanted, alone & turns)
                )
            counts[entry.target] += 1
    return found


class Attendance(Unfollowed):
    """One such pass. It stands aside but for the stretches between players in which a cue is waited for."""

    def __init__(self, cues: Cues, read: Read) -> None:
        super().__init__()
        self.cues, self._read = cues, read
        self._calls = 0  # of players
        self._cues: Sequence[Cue] = ()  # that are still to come in the stretch
        self._counts: Counter[Any] = Counter()
        self._missed = self._there = False
        self._listen()

    def enter(self, name: str) -> None:
        """A player is about to run."""
        self._missed = self._missed or bool(self._cues) or self.cues.order[self._calls : self._calls + 1] != [name]
        self._cues = ()
        if self._there and is_innermost(self):
            torch._C._pop_torch_function_stack()
            self._there = False
        self._calls += 1

    def leave(self) -> None:
        """It has."""
        self._listen()

    def end(self) -> bool:
        """Has all come that was to, and nothing else?"""
        complete = not self._missed and not self._cues and self._calls == len(self.cues.order)
        self._cues = ()
        if self._there:
            take_off(self)
            self._there = False
        return complete

    def _listen(self) -> None:
        cues = self.cues.after.get(self._calls)
        if cues is None:
            return
        self._cues = cues
        self._counts.clear()
        if not self._there:
            torch._C._push_on_torch_function_stack(self)
            self._there = True

    def _see(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._cues:
            cue = self._cues[0]
            if self._counts[func] == cue.before and (cue.target is func or equal(cue.target, func)):
                self._cues = self._cues[1:]
                args, kwargs = self._aliased(cue, args, kwargs)
            self._counts[func] += 1
        return func(*args, **kwargs)

    def _aliased(self, cue: Cue, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with aliases of what goes along an edge; of one tensor there is one."""
        numbers, aliases = iter(range(2**31)), dict[int, Tensor]()

        def alias(t: Tensor) -> Tensor:
            turn = cue.turns.get(next(numbers))
            if turn is None or not t.requires_grad:
                return t
            if turn not in aliases:
                aliases[turn] = self._read(t, turn, cue.entry, turn in cue.alone)
            return aliases[turn]

        both: tuple[Any, Any] = mapped(alias, (args, kwargs))
        return both

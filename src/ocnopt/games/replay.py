"""A pass, run again on its data flow: the readings of single edges.

A pass of which it was foreseen what it would do is read while it runs (see :mod:`ocnopt.games.following`). This is how
the live edges of any other are found: it costs as much as the pass itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ocnopt.capture import Tape
from ocnopt.games.edges import Edge, occurrences
from ocnopt.games.flow import Flow, Overwriting, arguments, is_due, name_of
from ocnopt.hooks import without_backward_hooks
from ocnopt.readings import Reading, arrived, product, same_size
from ocnopt.records import Pass, Record, Rollout, floating
from ocnopt.trees import is_alone, tensors


class Disagreement(RuntimeError):
    """Between a pass and its data flow."""


#: a reader, and which of its arguments (of a player), or what it reads (of an operation, once however often)
Place = tuple[fx.Node, int | fx.Node]


class Replayed(NamedTuple):
    readings: list[tuple[Edge, Reading]]  # of edges that an adjoint arrives at
    done: bool  # was the data flow verified, if that was due?


class Seen(NamedTuple):
    """What the pass knows of a call of a player."""

    readings: Mapping[int, Reading]  # by input
    sizes: Mapping[int, tuple[torch.dtype, list[Tensor]]]  # of the adjoints at its outputs
    opaque: bool


def replay(flow: Flow, tape: Tape, this: Pass, edges: Sequence[Edge], batch: int | None) -> Replayed:
    """The readings of those edges. Call it before anybody acts.

    A data flow is trusted only if it gives what the pass itself saw. Looked at again after a while: much does not show
    in the first step, when weights may be zero.

    Args:
        batch: how many samples there are, where products are wanted sample by sample.
    """
    looks = is_due(flow) or this.watched is not None
    players = seen_in(flow, this, tape.records) if looks and not this.foreseen else {}
    into_players = [(node, call) for call in players for node in arguments(call)]
    again = _Again(flow, this, edges, into_players, batch)
    try:
        again.run(tape, players, looks)
    except (Disagreement, torch.OutOfMemoryError):
        raise
    except Exception:
        if not again.has_overwritten:
            raise
        # the pass could, because what it saved for its backward pass is kept elsewhere
        flow.copies, again = True, _Again(flow, this, edges, into_players, batch)
        again.run(tape, players, looks)
    found = arrived(again.readings)
    readings = [(edge, found[place]) for edge in edges for place in places(edge) if place in found]
    return Replayed(readings, not is_due(flow) or (again.has_compared and not this.foreseen))


def places(edge: Edge) -> list[Place]:
    """Where a reader takes what comes along an edge. A player takes each of its arguments by itself, as in the pass: in
    which order gradients are added up shows in their last digits.
    """
    source, user = edge
    if user.op != "call_module":
        return [(user, source)]
    return [(user, i) for i, node in enumerate(arguments(user)) if node is source]


class _Again:
    """``edges``: to be read; ``others``: to be compared with what was read in the pass itself."""

    def __init__(
        self, flow: Flow, this: Pass, edges: Sequence[Edge], others: Sequence[Edge], batch: int | None
    ) -> None:
        self.flow, self.this, self.batch = flow, this, batch
        self.kept, self.sized = set(edges), set(others)
        self.readings: dict[Place, Reading] = {}
        self.sizes: dict[tuple[fx.Node, int], Tensor] = {}  # of the adjoints at the outputs of players
        self.values: dict[fx.Node, Any] = {}  # in the end, of the outputs
        self._watched: list[GradientEdge] = []
        self._hooks: list[RemovableHandle] = []  # on parameters, say, which a player may hand out
        self.has_overwritten = False
        self.has_compared = False  # has it turned out whether anything is what it was?
        self._wanted: list[Any] = []  # values that stay as they are: those of before the pass, and what is compared

    def run(self, tape: Tape, players: Mapping[fx.Node, Seen], looks: bool) -> None:
        """``looks``: at the outputs of the model, whether they are what they were; at ``players`` always."""
        assert self.this.environment is not None
        quiet = without_backward_hooks(tape.model)
        with closing(self), tape.following(Rollout()), self.this.environment.repeated(), torch.enable_grad(), quiet:
            self.forward(tape.model, players)
            where = self.odd_output() if looks else None
            self.backward()
        where = where or self.odd_player(players)
        if where is not None:
            raise Disagreement(f"its operations, run again, give other numbers at {where}")

    def forward(self, model: nn.Module, players: Collection[fx.Node]) -> None:
        """``players``: at whose outputs to listen."""
        inputs = iter(tensors((self.this.args, self.this.kwargs)))
        readers = {node: len(node.users) for node in self.flow.graph.nodes}
        for node in self.flow.outputs:
            if node is not None:
                readers[node] += 1
        for node in self.flow.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = next(inputs)
            else:
                in_place = self._may_overwrite(node)
                self.values[node] = self.flow.run(node, self._reader(node), model, self.this.draws, in_place)
            if node.op in ("placeholder", "get_attr"):
                self._wanted.append(self.values[node])
            if node in players:
                self._listen(node)
            for read in node.all_input_nodes:
                readers[read] -= 1
                if not readers[read]:
                    del self.values[read]

    def _may_overwrite(self, node: fx.Node) -> bool:
        """Operations come in the order of the pass, so what one of them overwrites is read by none that follows."""
        if self.flow.copies or not isinstance(node.target, Overwriting):
            return False
        changed = node.target.changed(node)
        if (changed, node) in self.kept or (changed, node) in self.sized:
            return False
        others = (value for source, value in self.values.items() if source is not changed)
        alone = is_alone(self.values[changed], (*self._wanted, *others))
        self.has_overwritten = self.has_overwritten or alone
        return alone

    def _reader(self, user: fx.Node) -> Callable[[fx.Node], Any]:
        """What gives a node the values that it asks for, one after another, or aliases of them."""
        numbers, aliases = count(), dict[fx.Node, Tensor]()

        def read(source: fx.Node) -> Any:
            player = user.op == "call_module" and source.meta.get("kind") == "real"
            number = next(numbers) if player else -1
            if (source, user) not in self.kept and (source, user) not in self.sized:
                return self.values[source]
            if player:
                return self._alias((source, user), (user, number))
            if source not in aliases:
                aliases[source] = self._alias((source, user), (user, source))
            return aliases[source]

        return read

    def _alias(self, edge: Edge, place: Place) -> Tensor:
        """Its gradient is that of the edge alone."""
        t: Tensor = self.values[edge[0]]
        if not t.requires_grad:
            return t
        reading = self.readings[place] = Reading(t, self.batch)
        self._wanted.append(t)
        t = t.view_as(t)
        kept, sized = edge in self.kept, edge in self.sized
        t.register_hook(lambda d: reading.arrive(d, last=True, kept=kept, sized=sized))
        self._watched.append(get_gradient_edge(t))
        return t

    def _listen(self, call: fx.Node) -> None:
        for i, t in enumerate(floating(self.values[call])):
            if t.requires_grad:
                self._hooks.append(t.register_hook(partial(self._hear, (call, i))))
                self._watched.append(get_gradient_edge(t))  # t may be overwritten

    def _hear(self, place: tuple[fx.Node, int], h: Tensor) -> None:
        self.sizes[place] = product(h, h)

    def backward(self) -> None:
        """From the adjoints at the model's outputs."""
        self._wanted = []
        ends = [(self.values[node], D) for i, D in arrived(self.this.D).items() if (node := self.flow.outputs[i])]
        roots = [(t, D.adjoint.to(t.dtype)) for t, D in ends if t.requires_grad and D.adjoint is not None]
        if roots and self._watched:
            outputs, adjoints = zip(*roots, strict=True)
            torch.autograd.grad(outputs, self._watched, adjoints, allow_unused=True)

    def close(self) -> None:
        """Hooks hold on to this, and nobody would find the circle."""
        self._watched, self._wanted, self.values = [], [], {}
        for hook in self._hooks:
            hook.remove()

    def odd_output(self) -> str | None:
        ends = ((self.flow.outputs[i], D) for i, D in arrived(self.this.D).items())
        same = self._are_same(D.is_of(self.values[node]) for node, D in ends if node is not None)
        return None if same else "the output"

    def odd_player(self, players: Mapping[fx.Node, Seen]) -> str | None:
        """The first player that read, or was told, something else than in the pass itself, by more than rounding."""
        for call, seen in players.items():
            if seen.opaque or any(reading.overwritten for reading in seen.readings.values()):
                continue  # then it is not known what it read
            if not (self._are_same(self._inputs(call, seen)) and self._are_same(self._adjoints(call, seen))):
                return repr(name_of(call))
        return None

    def _inputs(self, call: fx.Node, seen: Seen) -> Iterator[bool | None]:
        for i, reading in seen.readings.items():
            found = self.readings.get((call, i))
            if found is not None:  # what needs no gradient is not read
                yield reading.agrees(found)

    def _adjoints(self, call: fx.Node, seen: Seen) -> Iterator[bool | None]:
        for i, (dtype, sizes) in seen.sizes.items():
            if len(sizes) == 1:
                yield same_size(self.sizes.get((call, i), torch.zeros_like(sizes[0])), sizes[0], dtype)

    def _are_same(self, answers: Iterable[bool | None]) -> bool:
        """As far as they can be compared."""
        known = [answer for answer in answers if answer is not None]
        self.has_compared = self.has_compared or bool(known)
        return all(known)


def seen_in(flow: Flow, this: Pass, records: Iterable[Record]) -> dict[fx.Node, Seen]:
    """Of the calls of players in a pass, those that somebody was asked about."""
    by_call = {(r.name, r.occurrence): r for r in records if r.origin is this}
    found = {}
    for call, n in occurrences(flow).items():
        record, readings = by_call.get((name_of(call), n)), this.read_by(name_of(call), n)
        if record is not None:
            found[call] = Seen({**record.readings, **readings}, record.sizes, record.opaque)
        elif readings:
            found[call] = Seen(readings, {}, False)
    return found

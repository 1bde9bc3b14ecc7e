"""A pass, run again on its data flow: the readings of single edges.

A pass of which it was foreseen what it would do is read while it runs (see :mod:`ocnopt.games.following`). This is how
the live edges of any other are found: it costs as much as the pass itself.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from ocnopt.capture import Tape
from ocnopt.games.edges import Edge, occurrences
from ocnopt.games.flow import Flow, arguments, is_due, name_of
from ocnopt.hooks import without_backward_hooks
from ocnopt.readings import Reading, arrived, product, same_size
from ocnopt.records import Pass, Record, Rollout, floating
from ocnopt.trees import tensors


class Disagreement(RuntimeError):
    """Between a pass and its data flow."""


def replay(flow: Flow, tape: Tape, this: Pass, edges: Sequence[Edge], batch: int | None) -> dict[Edge, Reading]:
    """The readings of those edges that an adjoint arrives at. Call it before anybody acts.

    A data flow is trusted only if it gives what the pass itself saw. Looked at again after a while: much does not show
    in the first step, when weights may be zero.

    Args:
        batch: how many samples there are, where products are wanted sample by sample.
    """
    assert this.environment is not None
    looks = is_due(flow) or this.watched is not None
    records = records_of(flow, this, tape.records) if looks and not this.foreseen else {}
    into_players = [(node, call) for call in records for node in arguments(call)]
    quiet = without_backward_hooks(tape.model)
    with tape.following(Rollout()), this.environment.repeated(), torch.enable_grad(), quiet:
        again = _Again(flow, this, edges, into_players, batch)
        again.forward(tape.model, records)
        where = again.odd_output() if looks else None
        again.backward()
    where = where or again.odd_player(records)
    if where is not None:
        raise Disagreement(f"its operations, run again, give other numbers at {where}")
    return arrived({edge: again.readings[edge] for edge in edges if edge in again.readings})


class _Again:
    """``edges``: to be read; ``others``: to be compared with what was read in the pass itself."""

    def __init__(
        self, flow: Flow, this: Pass, edges: Sequence[Edge], others: Sequence[Edge], batch: int | None
    ) -> None:
        self.flow, self.this, self.batch = flow, this, batch
        self.kept, self.sized = set(edges), set(others)
        self.sources: dict[fx.Node, list[fx.Node]] = {}  # by reader
        for source, user in dict.fromkeys((*edges, *others)):
            self.sources.setdefault(user, []).append(source)
        self.readings: dict[Edge, Reading] = {}
        self.sizes: dict[tuple[fx.Node, int], Tensor] = {}  # of the adjoints at the outputs of players
        self.values: dict[fx.Node, Any] = {}  # in the end, of the outputs
        self._watched: list[Tensor] = []

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
                mine = {source: self._read(source, node) for source in self.sources.get(node, ())}
                self.values[node] = self.flow.run(node, ChainMap(mine, self.values), model, self.this.draws)
            if node in players:
                self._listen(node)
            for read in node.all_input_nodes:
                readers[read] -= 1
                if not readers[read]:
                    del self.values[read]

    def _read(self, source: fx.Node, user: fx.Node) -> Tensor:
        """An alias, whose gradient is that of the edge alone."""
        t: Tensor = self.values[source]
        if not t.requires_grad:
            return t
        edge, reading = (source, user), Reading(t, self.batch)
        t = t.view_as(t)
        how = {"last": True, "kept": edge in self.kept, "sized": edge in self.sized}
        t.register_hook(lambda d: reading.arrive(d, **how))
        self.readings[edge] = reading
        self._watched.append(t)
        return t

    def _listen(self, call: fx.Node) -> None:
        for i, t in enumerate(floating(self.values[call])):
            if t.requires_grad:
                t.register_hook(partial(self._hear, (call, i)))
                self._watched.append(t)

    def _hear(self, place: tuple[fx.Node, int], h: Tensor) -> None:
        self.sizes[place] = product(h, h)

    def backward(self) -> None:
        """From the adjoints at the model's outputs."""
        ends = [(self.values[node], D) for i, D in arrived(self.this.D).items() if (node := self.flow.outputs[i])]
        roots = [(t, D.adjoint.to(t.dtype)) for t, D in ends if t.requires_grad and D.adjoint is not None]
        if roots and self._watched:
            outputs, adjoints = zip(*roots, strict=True)
            torch.autograd.grad(outputs, self._watched, adjoints, allow_unused=True)
        self._watched, self.values = [], {}  # their hooks hold on to this, and nobody would find the circle

    def odd_output(self) -> str | None:
        ends = ((self.flow.outputs[i], D) for i, D in arrived(self.this.D).items())
        same = all(node is None or D.is_of(self.values[node]) for node, D in ends)
        return None if same else "the output"

    def odd_player(self, records: Mapping[fx.Node, Record]) -> str | None:
        """The first player that read, or was told, something else than in the pass itself, by more than rounding."""
        for call, record in records.items():
            if record.opaque or any(reading.overwritten for reading in record.readings.values()):
                continue  # then it is not known what it read
            if not (self._same_inputs(call, record) and self._same_adjoints(call, record)):
                return repr(name_of(call))
        return None

    def _same_inputs(self, call: fx.Node, record: Record) -> bool:
        read = arguments(call)
        for node in dict.fromkeys(read):
            seen = [reading for i, reading in record.readings.items() if read[i] is node]
            found = self.readings.get((node, call))
            # what is read twice there is read once here, and what needs no gradient is not read
            if len(seen) == 1 and found is not None and not seen[0].agrees(found):
                return False
        return True

    def _same_adjoints(self, call: fx.Node, record: Record) -> bool:
        for i, (dtype, seen) in record.sizes.items():
            found = self.sizes.get((call, i), torch.zeros_like(seen[0]))
            if len(seen) == 1 and not same_size(found, seen[0], dtype):
                return False
        return True


def records_of(flow: Flow, this: Pass, records: Iterable[Record]) -> dict[fx.Node, Record]:
    """Of the calls of players in a pass."""
    by_call = {(r.name, r.occurrence): r for r in records if r.origin is this}
    found = {call: by_call.get((name_of(call), n)) for call, n in occurrences(flow).items()}
    return {call: record for call, record in found.items() if record is not None}

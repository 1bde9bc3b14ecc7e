"""A pass, run again on its data flow: the readings of single edges.

A pass of which it was foreseen what it would do is read while it runs (see :mod:`ocnopt.games.following`). This is how
the live edges of any other are found: it costs as much as the pass itself.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ocnopt.capture import Tape
from ocnopt.games.edges import Edge, occurrences
from ocnopt.games.flow import Flow, arguments, is_due, name_of
from ocnopt.readings import Reading, arrived
from ocnopt.records import Pass, Record, Rollout
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
    records = records_of(flow, this, tape.records) if looks and this.watched is None else {}
    into_players = [(node, call) for call in records for node in arguments(call)]
    with tape.following(Rollout()), this.environment.repeated(), torch.enable_grad():
        again = _Again(flow, this, edges, into_players, batch)
        again.forward(tape.model)
        where = again.odd_output() if looks else None
        again.backward()
    where = where or _odd_player(records, again.readings)
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
        self.values: dict[fx.Node, Any] = {}  # in the end, of the outputs
        self._aliases: list[Tensor] = []

    def forward(self, model: nn.Module) -> None:
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
        self._aliases.append(t)
        return t

    def backward(self) -> None:
        """From the adjoints at the model's outputs."""
        ends = [(self.values[node], D) for i, D in arrived(self.this.D).items() if (node := self.flow.outputs[i])]
        roots = [(t, D.adjoint.to(t.dtype)) for t, D in ends if t.requires_grad and D.adjoint is not None]
        if roots and self._aliases:
            outputs, adjoints = zip(*roots, strict=True)
            torch.autograd.grad(outputs, self._aliases, adjoints, allow_unused=True)

    def odd_output(self) -> str | None:
        ends = ((self.flow.outputs[i], D) for i, D in arrived(self.this.D).items())
        same = all(node is None or D.is_of(self.values[node]) for node, D in ends)
        return None if same else "the output"


def records_of(flow: Flow, this: Pass, records: Iterable[Record]) -> dict[fx.Node, Record]:
    """Of the calls of players in a pass."""
    by_call = {(r.name, r.occurrence): r for r in records if r.origin is this}
    found = {call: by_call.get((name_of(call), n)) for call, n in occurrences(flow).items()}
    return {call: record for call, record in found.items() if record is not None}


def _odd_player(records: Mapping[fx.Node, Record], found: Mapping[Edge, Reading]) -> str | None:
    """The first player that read something else than in the replay, by more than rounding."""
    for call, record in records.items():
        if record.opaque or any(reading.overwritten for reading in record.readings.values()):
            continue  # then it is not known what it read
        read = arguments(call)
        for node in dict.fromkeys(read):
            seen = [reading for i, reading in record.readings.items() if read[i] is node]
            # what is read twice there is read once here, and what needs no gradient is not read
            if len(seen) == 1 and (node, call) in found and not seen[0].agrees(found[node, call]):
                return repr(name_of(call))
    return None

"""The operations between the players, run again on what the first pass left: values and gradients of single edges.

The players run only where their output was not kept: else it is there, and so are the adjoints at their inputs. What
lies between is cheap (activations, sums, attention scores), and the user's own pass need not be touched for it.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ocnopt.capture import Tape
from ocnopt.games.flow import Flow, arguments, name_of
from ocnopt.records import Pass, Record, Rollout
from ocnopt.trees import tensors

#: a node, and one that reads it
Edge = tuple[fx.Node, fx.Node]


@dataclass
class Replay:
    """Everything in it is of the first pass: call :meth:`run` before anybody acts."""

    flow: Flow
    model: nn.Module
    this: Pass
    records: Mapping[fx.Node, Record]  # of the calls that an adjoint arrived at

    @classmethod
    def of(cls, flow: Flow, model: nn.Module, this: Pass, records: Iterable[Record]) -> Replay:
        by_call = {(r.name, r.occurrence): r for r in records if r.origin is this}
        counts: dict[str, int] = {}
        found: dict[fx.Node, Record] = {}
        for call in flow.calls:
            occurrence = counts.get(name_of(call), 0)
            counts[name_of(call)] = occurrence + 1
            if (record := by_call.get((name_of(call), occurrence))) is not None:
                found[call] = record
        return cls(flow, model, this, found)

    def run(self, edges: Sequence[Edge]) -> tuple[dict[fx.Node, Any], dict[Edge, Tensor]]:
        """The values of all nodes, and the gradient through each edge into an operation that one arrives at."""
        values, aliases, _ = self._forward(edges)
        trained = [edge for edge in edges if aliases[edge].requires_grad]
        grads = self._backward(values, [aliases[edge] for edge in trained])
        return values, {edge: g for edge, g in zip(trained, grads, strict=True) if g is not None}

    def disagreement(self) -> str | None:
        """The first player at which the replay differs from what the pass itself saw, if there is one."""
        values, _, leaves = self._forward(())
        for call, record in self.records.items():
            for node, kept in zip(arguments(call), record.inputs, strict=True):
                if not record.overwritten() and _differ(values[node], kept):
                    return name_of(call)
            with torch.no_grad():
                out = self.flow.run(call, values, self.model, self.this.draws)
            for i, kept in record.outputs.items():
                if _differ(out if isinstance(out, Tensor) else out[i], kept):
                    return name_of(call)  # hooks on it, or somebody who lends it other weights
        known = [(call, i) for call, i in leaves if i in self.records[call].h]
        grads = self._backward(values, [leaves[key] for key in known])
        for (call, i), g in zip(known, grads, strict=True):
            h = self.records[call].h[i]
            if _differ(torch.zeros_like(h) if g is None else g, h):
                return name_of(call)
        return None

    def _forward(
        self, edges: Sequence[Edge]
    ) -> tuple[dict[fx.Node, Any], dict[Edge, Tensor], dict[tuple[fx.Node, int], Tensor]]:
        """Values; of each edge an alias that its reader gets: its gradient is that of the edge alone; the outputs of
        the players.
        """
        watched: dict[fx.Node, list[fx.Node]] = {}
        for source, user in edges:
            watched.setdefault(user, []).append(source)
        values: dict[fx.Node, Any] = {}
        aliases: dict[Edge, Tensor] = {}
        leaves: dict[tuple[fx.Node, int], Tensor] = {}
        inputs = iter(tensors((self.this.args, self.this.kwargs)))
        with torch.enable_grad():
            for node in self.flow.graph.nodes:
                if node.op == "placeholder":
                    values[node] = next(inputs)
                elif node.op == "call_module":
                    values[node] = self._output(node, values, leaves)
                elif node.op == "get_attr":
                    values[node] = self.flow.run(node, values, self.model, {}).detach()
                else:
                    mine = {source: values[source].view_as(values[source]) for source in watched.get(node, ())}
                    aliases.update({(source, node): t for source, t in mine.items()})
                    values[node] = self.flow.run(node, ChainMap(mine, values), self.model, self.this.draws)
        return values, aliases, leaves

    def _output(
        self, call: fx.Node, values: Mapping[fx.Node, Any], leaves: dict[tuple[fx.Node, int], Tensor]
    ) -> Tensor | list[Tensor]:
        record = self.records.get(call)
        kept = {} if record is None else record.outputs
        if record is None or len(kept) < call.meta["outputs"]:
            with torch.no_grad():  # not kept: the parameters are still those of the first pass
                out = self.flow.run(call, values, self.model, self.this.draws)
            kept = dict(enumerate([out] if isinstance(out, Tensor) else out))
        made = [kept[i].detach().requires_grad_(record is not None) for i in range(len(kept))]
        if record is not None:
            leaves.update({(call, i): t for i, t in enumerate(made)})
        return made[0] if call.meta["single"] else made

    def _backward(self, values: Mapping[fx.Node, Any], wanted: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """∂L/∂wanted, from the adjoints at the players' inputs and at the model's outputs."""
        roots: list[tuple[Tensor, Tensor]] = []
        for call, record in self.records.items():
            read = arguments(call)
            roots += [(values[read[i]], d) for i, d in record.d.items()]
        for i, D in self.this.D.items():
            node = self.flow.outputs[i]
            if node is not None:
                roots.append((values[node], D))
        roots = [(t, g.to(t.dtype)) for t, g in roots if t.requires_grad]
        if not roots or not wanted:
            return [None] * len(wanted)
        outputs, adjoints = zip(*roots, strict=True)
        return torch.autograd.grad(outputs, wanted, adjoints, allow_unused=True)


def verify(flow: Flow, tape: Tape, this: Pass) -> None:
    """Trust a data flow only if its operations, run again, give what the pass itself saw, forward and backward.

    Looked at again after a while: much does not show in the first step, when weights may be zero.
    """
    looks = is_due(flow)
    flow.uses += 1
    if not looks:
        return
    assert this.environment is not None
    with tape.following(Rollout()), this.environment.repeated():
        where = Replay.of(flow, tape.model, this, tape.records).disagreement()
    if where is not None:
        flow.fixed = f"its operations, run again, give other numbers at {where!r}"


def is_due(flow: Flow) -> bool:
    """Is the coming use one at which :func:`verify` looks, and waits for the device?"""
    return flow.uses + 1 in (1, 10, 100, 1000)


def _differ(found: Tensor, kept: Tensor) -> bool:
    """By more than rounding?"""
    if found.shape != kept.shape:
        return True
    tolerance = 1e-6 if kept.dtype == torch.float64 else 1e-3 if kept.dtype == torch.float32 else 5e-2
    gap = torch.linalg.vector_norm((found.detach() - kept).double())
    return bool(gap > tolerance * torch.linalg.vector_norm(kept.double()) + 1e-30)

"""The nonlinear rollout on a known data flow: stage by stage, whatever the order of the lines of the code.

The state of a stage is what was computed before it and is still to be read: the live edges. Each adds
⟨∂L/∂e through this edge, δe⟩ to s, the paper's Markov state x_k = [z_k, z_{k-1}, …] of a residual block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ocnopt.capture import Tape
from ocnopt.games.flow import Flow, arguments
from ocnopt.games.replay import Replay
from ocnopt.games.schedule import Placement
from ocnopt.groups import Groups
from ocnopt.records import Pass, Rollout
from ocnopt.rollout import Act, Measure, Predict
from ocnopt.stages import Stages
from ocnopt.trees import tensors


class Edges:
    """The edges that are live at some stage, by kind of reader. They depend on the placement alone."""

    def __init__(self, flow: Flow, placement: Placement) -> None:
        stage = placement.stage
        crossing = [
            (source, user)
            for source in flow.graph.nodes
            if stage.get(source, -1) >= 0 and source.meta.get("kind") == "real" and not source.meta.get("parameter")
            for user in source.users
            if stage.get(user, -1) > stage[source]
        ]
        self.into_players = [edge for edge in crossing if edge[1].op == "call_module"]
        self.into_operations = [edge for edge in crossing if edge[1].op != "call_module"]
        self.into_outputs = [(i, node) for i, node in enumerate(flow.outputs) if node is not None and stage[node] >= 0]


@dataclass
class Term:
    """A live edge: what the loss thinks of it, its value in the first pass, and the last stage that it lives to see."""

    adjoint: Tensor
    before: Tensor
    last: int


class Live:
    """The rollout of one pass on its data flow. Made before anybody acts."""

    def __init__(self, flow: Flow, placement: Placement, edges: Edges, tape: Tape, this: Pass) -> None:
        self.flow, self.placement, self.tape, self.this = flow, placement, tape, this
        self.terms: dict[fx.Node, list[Term]] = defaultdict(list)  # by source
        replay = Replay.of(flow, tape.model, this, tape.records)
        self.records = list(replay.records.values())
        self._of_players(replay, edges)
        self._of_operations(replay, edges)
        for i, node in edges.into_outputs:
            if i in this.D:
                self.terms[node].append(Term(this.D[i], this.outputs[i], placement.count))

    def _of_players(self, replay: Replay, edges: Edges) -> None:
        for source, call in edges.into_players:
            record = replay.records.get(call)
            for i, node in enumerate(arguments(call) if record is not None else ()):
                if node is source and record is not None and i in record.d:
                    self.terms[source].append(Term(record.d[i], record.inputs[i], self.placement.stage[call]))

    def _of_operations(self, replay: Replay, edges: Edges) -> None:
        if not edges.into_operations:
            return
        assert self.this.environment is not None
        with self.tape.following(Rollout()), self.this.environment.repeated():
            values, adjoints = replay.run(edges.into_operations)
        for (source, user), adjoint in adjoints.items():
            self.terms[source].append(Term(adjoint, values[source].detach(), self.placement.stage[user]))

    def why_not(self, groups: Groups) -> str | None:
        """Why s cannot be told group by group, if so."""
        for record in self.records:
            if record.overwritten():
                return f"the input of {record.name!r} was overwritten in place"
        if self.this.outputs_changed():
            return "an output of the model was overwritten in place after the pass"
        shapes = [term.adjoint.shape for terms in self.terms.values() for term in terms]
        rows = all(shape[:1] == (groups.batch,) and (len(shape) < 3 or shape[1] != groups.batch) for shape in shapes)
        if groups.rank > 1 and (self.this.mixed or not rows):
            return "it cannot be told whether dimension 0 of all tensors between the layers runs over the samples"
        return None

    def roll_out(self, stages: Stages, act: Act, predict: Predict, measure: Measure) -> Tensor | None:
        """Run the network stage by stage. Returns the predicted change of the loss, ⟨∂L/∂x_K, δx_K⟩."""
        assert self.this.environment is not None
        self.tape.release()  # what is needed is in the terms
        base = measure.zero()
        for stage in stages.uncalled:
            act(stage, base)
            base = base + sum((predict(seat) for seat in stages.seats[stage]), measure.zero())
        try:
            with self.tape.following(Rollout()), self.this.environment.repeated():
                outputs = self._run(stages, act, measure, base)
        except Exception as error:
            self.flow.fixed = f"running it stage by stage failed ({error})"  # from the next step on
            error.add_note("feedback='nonlinear' runs the model again, without gradients; feedback='linear' does not")
            raise
        return self.this.change(outputs)

    def _run(self, stages: Stages, act: Act, measure: Measure, base: Tensor) -> list[Tensor]:
        values: dict[fx.Node, Any] = {}
        readers = {node: len(node.users) for node in self.flow.graph.nodes}
        for node in self.flow.outputs:
            if node is not None:
                readers[node] += 1  # never forgotten
        inputs = iter(tensors((self.this.args, self.this.kwargs)))
        live: list[tuple[int, Tensor]] = []  # the last stage of each term, and its part of s
        for k, nodes in enumerate(self.placement.nodes(self.flow), start=-1):
            live = [(last, part) for last, part in live if last >= k]
            if k in stages.at:
                act(stages.at[k], torch.stack([base, *(part for _, part in live)]).sum(0))
            for node in nodes:
                values[node] = next(inputs) if node.op == "placeholder" else self._value(node, values)
                for term in self.terms.pop(node, ()):
                    if term.before.shape == values[node].shape:
                        live.append((term.last, measure(term.adjoint, term.before, values[node])))
                    else:
                        self.flow.fixed = "the shapes of its tensors depend on their values"
                for read in node.all_input_nodes:
                    readers[read] -= 1
                    if not readers[read]:
                        del values[read]
        return [self.this.outputs[i] if node is None else values[node] for i, node in enumerate(self.flow.outputs)]

    def _value(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        return self.flow.run(node, values, self.tape.model, self.this.draws)

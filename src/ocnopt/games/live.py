"""The nonlinear rollout on a known data flow: stage by stage, whatever the order of the lines of the code.

The state of a stage is what was computed before it and is still to be read: the live edges. Each adds
⟨∂L/∂e through this edge, δe⟩ to s, the paper's Markov state x_k = [z_k, z_{k-1}, …] of a residual block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, fx

from ocnopt.capture import Tape
from ocnopt.games.edges import Edges, key_of
from ocnopt.games.flow import is_due
from ocnopt.games.game import Round
from ocnopt.games.program import Call, Run
from ocnopt.games.replay import replay
from ocnopt.groups import Part
from ocnopt.readings import Reading
from ocnopt.records import Pass, Rollout
from ocnopt.rollout import Act, Measure, Predict
from ocnopt.stages import Stages
from ocnopt.trees import tensors


@dataclass
class Term:
    """A live edge, and the last stage that it lives to see."""

    reading: Reading
    last: int


class Live:
    """One pass on its data flow. Made before anybody acts."""

    def __init__(self, placed: Round, tape: Tape, this: Pass, part: Part) -> None:
        self.flow, self.placement, self.tape, self.this = placed.flow, placed.placement, tape, this
        self.program = placed.program
        self._batch = None if part.rank == 1 else part.groups.batch  # see Measure
        self.terms: dict[int, list[Term]] = defaultdict(list)  # by the slot of the source
        self._alive: list[tuple[int, Tensor]] = []  # the last stage of each term, and its part of s
        self._sum: Tensor | None = None  # of these
        # was the data flow verified, if that was due? One that was foreseen cannot be
        self.done = not (this.foreseen and is_due(self.flow))
        self._run = Run(self.program, tape.model, tensors((this.args, this.kwargs)), this.draws)
        edges = placed.edges
        if this.watched is not None and edges.among(this.watched):
            self._of_players(edges)
            self._of_operations(edges)
        elif edges.into_players or edges.into_operations:
            self._again(edges)
        for i, node in edges.into_outputs:
            if i in this.D and this.D[i].adjoint is not None:
                self.terms[self.program.slots[node]].append(Term(this.D[i], self.placement.count))

    def _of_players(self, edges: Edges) -> None:
        for source, call, _, i in edges.places_of_players:
            self._add(source, call, self.this.readings.get(key_of(source, call, i)))

    def _of_operations(self, edges: Edges) -> None:
        for source, user in edges.into_operations:
            self._add(source, user, self.this.readings.get(key_of(source, user)))

    def _again(self, edges: Edges) -> None:
        """What was not read while the first pass ran."""
        wanted = [*edges.into_players, *edges.into_operations]
        found = replay(self.flow, self.tape, self.this, wanted, self._batch)
        self.done = found.done
        for (source, user), reading in found.readings:
            self._add(source, user, reading)

    def _add(self, source: fx.Node, user: fx.Node, reading: Reading | None) -> None:
        if reading is not None and reading.adjoint is not None:
            self.terms[self.program.slots[source]].append(Term(reading, self.placement.stage[user]))

    def why_not(self, part: Part) -> str | None:
        """Why s cannot be told group by group, if so."""
        for name, reading in self.this.readings_of_players:
            if reading.overwritten:
                return f"the input of {name!r} was overwritten in place"
        if any(reading.overwritten for reading in self.this.readings.values()):
            return "what lies between its layers was overwritten in place"
        sources = [(node, slot) for node, slot in self.program.slots.items() if part.rank > 1 and slot in self.terms]
        by_sample = all(self._by_sample(node, slot, part.groups.batch) for node, slot in sources)
        if part.rank > 1 and (self.this.mixed or not by_sample):
            return "it cannot be told whether dimension 0 of all tensors between the layers runs over the samples"
        return None

    def _by_sample(self, source: fx.Node, slot: int, batch: int) -> bool:
        """Does dimension 0 run over the samples? Where dimension 1 is as long, it takes a layer that writes or reads
        the tensor to tell: what layers see has been probed.
        """
        readings = [term.reading for term in self.terms[slot]]
        if all(each.by_row and (len(each.shape) < 3 or each.shape[1] != batch) for each in readings):
            return True
        layers = (user for user in source.users if user.op == "call_module")
        probed = source.op == "call_module" or any(layer.all_input_nodes[0] is source for layer in layers)
        return probed and all(each.by_row for each in readings)

    def s(self, k: int) -> Tensor | None:
        """Σ⟨∂L/∂e, δe⟩ over the edges that stage k sees; ``None``: there are none."""
        alive = [(last, part) for last, part in self._alive if last >= k]
        if len(alive) < len(self._alive) or self._sum is None:  # few are alive at a time
            self._alive, self._sum = alive, reduce(torch.add, [part for _, part in alive]) if alive else None
        return self._sum

    def advance(self, k: int, calls: Sequence[Call], measure: Measure) -> None:
        """Run the operations of stage k."""
        for call in calls:
            value = self._run.value(call)
            for term in self.terms.pop(call.slot, ()):
                if term.reading.shape == value.shape:
                    part, self._sum = measure(term.reading, value, self.s(k + 1))
                    self._alive.append((term.last, part))
                else:
                    self.flow.fixed = "the shapes of its tensors depend on their values"
            self._run.forget(call)

    def change(self) -> Tensor | None:
        """⟨∂L/∂x_K, δx_K⟩, when all has run."""
        nodes = enumerate(self.flow.outputs)
        values, slots = self._run.values, self.program.slots
        return self.this.change({i: values[slots[node]] for i, node in nodes if node is not None})


def roll_out(
    passes: Sequence[Live], stages: Stages, act: Act, predict: Predict, measures: Sequence[Measure]
) -> Tensor | None:
    """Run the network stage by stage, each on all passes before the next. Returns the predicted change of the loss."""
    first, zero = passes[0], measures[0].zero()
    assert first.this.environment is not None
    first.tape.release()
    for record in first.tape.records:  # what is compared is in the terms
        record.readings, record.outputs, record.h = {}, {}, {}
    base = zero
    for stage in stages.uncalled:
        act(stage, base)
        base = base + sum((predict(seat) for seat in stages.seats[stage]), zero)
    try:
        with first.tape.following(Rollout()), first.this.environment.repeated():
            for k, calls in enumerate(zip(*(live.program.stages for live in passes), strict=True), start=-1):
                if k in stages.at:
                    seen = [part for live in passes if (part := live.s(k)) is not None]
                    act(stages.at[k], reduce(torch.add, seen if base is zero and seen else [base, *seen]))
                for live, theirs, measure in zip(passes, calls, measures, strict=True):
                    live.advance(k, theirs, measure)
    except Exception as error:
        for live in passes:
            live.flow.fixed = f"running it stage by stage failed ({error})"  # from the next step on
        error.add_note("feedback='nonlinear' runs the model again, without gradients; feedback='linear' does not")
        raise
    changes = [live.change() for live in passes]
    known = [change for change in changes if change is not None]
    return reduce(torch.add, known) if len(known) == len(changes) else None

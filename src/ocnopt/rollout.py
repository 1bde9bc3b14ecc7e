"""The nonlinear rollout, eq. (dxk) of the paper: the network runs forward once more, each layer updated just before
it runs.

Here the model runs as its code is written. Where its data flow is known, :mod:`ocnopt.games.live` runs it stage by
stage instead. (The *linear* rollout needs no network: s_{k+1} = s_k − K_k w_k − u_k. It is a few lines in
:mod:`ocnopt.play`.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ocnopt.again import again, aside
from ocnopt.capture import Tape
from ocnopt.groups import Part
from ocnopt.readings import Reading, arrived
from ocnopt.records import Pass, Record, Rollout, floating
from ocnopt.stages import Stages

#: (stage, s): asks the policy and updates the players of the stage
Act = Callable[[int, Tensor], None]
#: seat → the change of each group's loss that the step it has just taken is expected to make
Predict = Callable[[int], Tensor]


@dataclass
class Measure:
    """⟨∂L/∂e, δe⟩ by group of samples, of one pass."""

    part: Part
    like: Tensor  # [r], of the dtype and on the device of the answers
    sign: float  # −1 where the loss is maximised
    scale: Tensor | None = None  # what the adjoints are to be multiplied by

    def zero(self) -> Tensor:
        return torch.zeros_like(self.like)

    def fits(self, reading: Reading, now: Tensor) -> bool:
        """Can the change of a tensor be told group by group, as far as its shape tells?"""
        return now.shape == reading.shape and (self.part.rank == 1 or reading.by_row)

    @property
    def batch(self) -> int | None:
        """How many samples a tensor has to have in dimension 0, where it is measured group by group."""
        return None if self.part.rank == 1 else self.part.groups.batch

    def __call__(self, reading: Reading, now: Tensor, plus: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The change, and that of others ``plus`` it."""
        if (both := self._at_once(reading, now, plus)) is not None:
            return both[0], both[1]
        changes = reading.change(now).to(self.like)
        if self.part.rank == 1:
            changes = changes.sum(0, keepdim=True) if changes.dim() else changes.reshape(1)
        else:
            changes = self.part.add(None, self.part.groups.sum(changes))
        changes = changes if self.scale is None else self.scale.to(changes) * changes
        changes = changes if self.sign == 1 else self.sign * changes
        return changes, changes if plus is None else plus + changes

    def _at_once(self, reading: Reading, now: Tensor, plus: Tensor | None) -> Tensor | None:
        """By one kernel, where that can be had."""
        rank, groups = self.part.rank, self.part.groups
        if self.like.dtype != torch.float32 or self.like.device != now.device or reading.by_row != (rank > 1):
            return None
        if rank > 1 and groups.rank != rank:  # other passes have other groups
            return None
        return reading.changes(now, groups if rank > 1 else None, self.scale, self.sign, plus)


class InOrder(Rollout):
    """Follows the second forward pass and lets each stage act when the first of its modules is about to run.

    In a chain the input of a layer is the whole state and s_k = Σ⟨d_k, δx_k⟩, the paper's Markov state. Elsewhere s
    is accumulated: every executed player adds ⟨h, δ(out)⟩ − ⟨d, δ(in)⟩, which needs no graph and differs at second
    order only.
    """

    def __init__(
        self, this: Pass, records: Sequence[Record], stages: Stages, act: Act, predict: Predict, measure: Measure
    ) -> None:
        self.chain, self.whole, self.measure = this.chain, this.whole, measure
        self.records, self.mixed = {(r.name, r.occurrence): r for r in records}, this.mixed
        self.stages, self.act, self.predict = stages, act, predict
        self.seat_of = {name: seat for seat, name in enumerate(stages.modules)}
        self.s = measure.zero()
        self.done: set[int] = set()
        self.unseen: list[int] = []  # seats that acted, and whose effect is not in s yet
        self._running: Record | None = None
        self._into: Tensor | None = None

    def act_before_all(self) -> None:
        """Players whose module is never called act first, so that every layer sees their change."""
        for stage in self.stages.uncalled:
            self._act(stage)
            self._predict(self.stages.seats[stage])

    def act_at_last(self) -> None:
        """Players whose module was not reached again, although it was in the first pass, still act."""
        for stage in range(self.stages.count):
            if stage not in self.done:
                self._act(stage)

    def before(self, name: str, occurrence: int, inputs: list[Tensor]) -> None:
        with aside():
            self._before(name, occurrence, inputs)

    def _before(self, name: str, occurrence: int, inputs: list[Tensor]) -> None:
        record = self._record(name, occurrence)
        stage = self._about_to_act(name)
        now = [t for t in inputs if t.is_floating_point()]
        self._into = None
        if record is not None and (stage is not None or not self.chain):  # in a chain nobody else asks for s
            self._into = self._change(arrived(record.readings), now)
        if record is not None:  # its memory is wanted by the layers to come
            record.readings = {}
        self._running = record
        if self.chain and self._into is not None:
            self.s, self.unseen = self._into, []
        elif self.chain and stage is not None:  # what the layer before did to this input cannot be measured here
            self._predict(list(self.unseen))
        if stage is not None:
            self._act(stage)
        if record is None and not self.chain:
            self._predict([self.seat_of.get(name, -1)])

    def after(self, name: str, occurrence: int, outputs: list[Tensor]) -> None:
        with aside():
            self._after(name, outputs)

    def _after(self, name: str, outputs: list[Tensor]) -> None:
        record, self._running = self._running, None
        if self.chain or record is None:
            return
        wrote, batch = record.outputs, self.measure.batch
        known = record.h.keys() <= wrote.keys() and all(wrote[i].shape == h.shape for i, h in record.h.items())
        written = {i: Reading.of(h, wrote[i], batch) for i, h in record.h.items()} if known else None
        out, seat = None if written is None else self._change(written, outputs), self.seat_of.get(name, -1)
        record.outputs, record.h = {}, {}
        if out is None or self._into is None:
            self._predict([seat])
            return
        self.s = self.s + out - self._into
        if seat in self.unseen:
            self.unseen.remove(seat)

    def _record(self, name: str, occurrence: int) -> Record | None:
        """What the first pass kept of this call, if the two can be compared."""
        record = self.records.get((name, occurrence))
        if record is None or record.opaque or any(r.overwritten for r in record.readings.values()):
            return None
        if not self.chain and not self.whole:  # what it wrote was not kept
            return None
        return None if self.measure.part.rank > 1 and name in self.mixed else record

    def _about_to_act(self, name: str) -> int | None:
        """The stage of a module, if it has not acted yet."""
        stage = self.stages.of_module.get(name)
        return None if stage in self.done else stage

    def _act(self, stage: int) -> None:
        self.done.add(stage)
        self.act(stage, self.s)
        self.unseen += self.stages.seats[stage]

    def _predict(self, seats: Sequence[int]) -> None:
        """Where the change cannot be measured, the policy's own prediction of it stands in."""
        for seat in seats:
            if seat in self.unseen:
                self.s = self.s + self.predict(seat)
                self.unseen.remove(seat)

    def _change(self, readings: Mapping[int, Reading], now: Sequence[Tensor]) -> Tensor | None:
        """Σ⟨∂L/∂e, δe⟩ by group of samples, or ``None`` where it cannot be told."""
        total: Tensor | None = None
        for i, reading in readings.items():
            if i >= len(now) or not self.measure.fits(reading, now[i]):
                return None
            _, total = self.measure(reading, now[i], total)
        return self.measure.zero() if total is None else total


def in_order(tape: Tape, this: Pass, follower: InOrder) -> Tensor | None:
    """Run the model a second time. Returns the predicted change of the loss, ⟨∂L/∂x_K, δx_K⟩."""
    assert this.environment is not None
    tape.release()
    follower.act_before_all()
    functions = [] if this.flow is None else [entry.target for entry in this.flow.entries if entry.kind == "operation"]
    try:
        with tape.following(follower), this.environment.repeated(), again(functions):
            output = tape.model(*this.args, **this.kwargs)
    except Exception as error:
        error.add_note("feedback='nonlinear' runs the model again, without gradients; feedback='linear' does not")
        raise
    follower.act_at_last()
    return this.change(dict(enumerate(floating(output))))

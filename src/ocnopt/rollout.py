"""The nonlinear rollout, eq. (dxk) of the paper: the network runs forward once more, each layer updated just before
it runs.

(The *linear* rollout needs no network: s_{k+1} = s_k − K_k w_k − u_k. It is a few lines in :mod:`ocnopt.play`.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ocnopt import capture
from ocnopt.capture import Pass, Record, Tape
from ocnopt.groups import Groups

#: (stage, s) → w: asks the policy and updates the players of the stage
Act = Callable[[int, Tensor], Tensor]
#: (stage, w) → the change of each group's loss that the step just taken is expected to make
Predict = Callable[[int, Tensor], Tensor]


class Nonlinear(capture.Rollout):
    """Follows the second forward pass and lets each stage act when its first module is about to run.

    In a chain the input of a layer is the whole state and s_k = Σ⟨d_k, δx_k⟩, the paper's Markov state. Elsewhere s
    is accumulated: every executed player adds ⟨h, δ(out)⟩ − ⟨d, δ(in)⟩, which needs no graph and differs at second
    order only.
    """

    def __init__(
        self,
        this: Pass,
        records: Sequence[Record],
        stage_of: Mapping[str, int],
        act: Act,
        predict: Predict,
        groups: Groups,
        sign: Tensor,
    ) -> None:
        self.chain, self.groups = this.chain, groups
        self.sign = sign  # [r], −1 where the loss is maximised
        self.records, self.mixed = {(r.name, r.occurrence): r for r in records}, this.mixed
        self.stage_of, self.act, self.predict = stage_of, act, predict
        self.s = torch.zeros_like(sign)
        self.done: set[int] = set()
        self._running: Record | None = None
        self._into: Tensor | None = None
        self._acted: tuple[int, Tensor] | None = None

    def act_before_all(self, stages: Sequence[int]) -> None:
        """Players whose module is never called act first, so that every layer sees their change."""
        for stage in stages:
            self._act(stage)
            self._predict()

    def act_at_last(self, stages: Sequence[int]) -> None:
        """Players whose module was not reached again, although it was in the first pass, still act."""
        for stage in stages:
            if stage not in self.done:
                self._act(stage)

    def before(self, name: str, occurrence: int, inputs: list[Tensor]) -> None:
        record = self._record(name, occurrence)
        now = [t for t in inputs if t.is_floating_point()]
        self._into = None if record is None else self._change(record.d, dict(enumerate(record.inputs)), now)
        if record is not None:  # its memory is wanted by the layers to come
            record.d, record.inputs, record.args, record.kwargs = {}, [], (), {}
        self._running = record
        if self.chain and self._into is not None:
            self.s = self._into
        elif self.chain:
            self._predict()  # what the layer before did to this input cannot be measured here
        self._acted = None
        stage = self.stage_of.get(name)
        if stage is not None and stage not in self.done:
            self._act(stage)
        if record is None and not self.chain:
            self._predict()

    def after(self, name: str, occurrence: int, outputs: list[Tensor]) -> None:
        record, self._running = self._running, None
        if self.chain or record is None:
            return
        out = self._change(record.h, record.outputs, outputs)
        record.outputs = {}
        if out is not None and self._into is not None:
            self.s = self.s + out - self._into
        else:
            self._predict()

    def _record(self, name: str, occurrence: int) -> Record | None:
        """What the first pass kept of this call, if the two can be compared."""
        record = self.records.get((name, occurrence))
        if record is None or record.opaque or record.overwritten():
            return None
        return None if self.groups.rank > 1 and name in self.mixed else record

    def _act(self, stage: int) -> None:
        self.done.add(stage)
        self._acted = stage, self.act(stage, self.s)

    def _predict(self) -> None:
        """Where the change cannot be measured, the policy's own prediction of it stands in."""
        if self._acted is not None:
            self.s = self.s + self.predict(*self._acted)
            self._acted = None

    def _change(
        self, adjoints: Mapping[int, Tensor], before: Mapping[int, Tensor], now: Sequence[Tensor]
    ) -> Tensor | None:
        """Σ⟨adjoint, δ⟩ by group of samples, or ``None`` where it cannot be told."""
        total = torch.zeros_like(self.sign)
        for i, adjoint in adjoints.items():
            if i not in before or i >= len(now) or now[i].shape != adjoint.shape:
                return None
            delta = now[i].to(total.dtype) - before[i].to(total.dtype)
            if self.groups.rank == 1:
                total = total + torch.dot(adjoint.to(total.dtype).reshape(-1), delta.reshape(-1))
            elif delta.shape[:1] == (self.groups.batch,):
                rows = (self.groups.batch, -1)
                total = total + self.groups.sum(
                    torch.linalg.vecdot(adjoint.to(total.dtype).reshape(rows), delta.reshape(rows))
                )
            else:
                return None
        return total * self.sign


def nonlinear(tape: Tape, this: Pass, follower: Nonlinear) -> Tensor | None:
    """Run the model a second time. Returns the predicted change of the loss, ⟨∂L/∂x_K, δx_K⟩."""
    assert this.environment is not None
    tape.rollout = follower
    try:
        with this.environment.repeated():
            output = tape.model(*this.args, **this.kwargs)
    finally:
        tape.rollout = None
    outputs = capture.floating(output)
    if len(outputs) != len(this.outputs) or this.outputs_changed():
        return None
    terms = [(D.double() * (outputs[i].double() - this.outputs[i].double())).sum() for i, D in this.D.items()]
    return torch.stack(terms).sum() if terms else None

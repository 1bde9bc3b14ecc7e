"""Acting by Triton kernels, on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ocnopt.actor import Answer, Scalar
from ocnopt.fused import support
from ocnopt.fused.actor import FusedActor
from ocnopt.fused.tables import laid_out
from ocnopt.gradients import Columns


@dataclass
class LaunchedActor(FusedActor):
    groups: Tensor = field(init=False)  # [parameters]: addresses of the columns, or anything
    correction: Tensor = field(init=False)  # 1 − μ^t
    _aligned: bool = field(init=False)  # see Table; of the columns, too

    @classmethod
    def chunk(cls) -> int:
        return int(support.kernels().CHUNK)

    def look(self) -> bool:
        layout, table = self.layout, self._table(self.grads)
        if table is None:
            return False
        if self.columns is not None:
            laid = [laid_out(G, p) for G, p in zip(self.columns.tensors, self.shelf.params, strict=True)]
            self.columns = Columns(laid)
        columns = (table.grads, True) if self.columns is None else layout.columns(self.columns.tensors)
        if columns is None:
            return False
        self.table, width = table, self.rank**2 + 2 * self.rank + 1
        self.groups, aligned = columns
        self._aligned = table.aligned and aligned
        partials = self.grads[0].new_empty(width * (layout.total + layout.width) + 1, dtype=torch.float32)
        self.rows = partials[-width * layout.width - 1 : -1].view(-1, width)
        self.correction = partials[-1]
        try:
            (self._look_at_all if self.columns is None else self._look_by_group)(partials)
        except Exception as error:  # whatever is missing, a step can be made without
            support.breaks(error)
            return False
        return True

    def _look_at_all(self, partials: Tensor) -> None:
        layout, kernels = self.layout, support.kernels()
        kernels.look[layout.total,](
            self.table.grads,
            self.table.others,
            layout.chunks,
            layout.decays(self.decays),
            self.moment.clock,
            partials,
            self.correction,
            layout.width,
            layout.total,
            self.momentum_cost,
            *self._of_averages,
            **self._constants,
            BLOCK=kernels.BLOCK,
        )
        kernels.add_up[layout.width,](partials, layout.firsts, self.rows, layout.total, BLOCK=256)

    def _look_by_group(self, partials: Tensor) -> None:
        layout, kernels, width = self.layout, support.kernels(), self.rows.shape[1]
        kernels.look_by_group[layout.total,](
            self.table.grads,
            self.groups,
            self.table.others,
            layout.chunks,
            layout.decays(self.decays),
            self.moment.clock,
            self.fractions,
            partials,
            self.correction,
            layout.width,
            self.momentum_cost,
            *self._of_averages,
            **self._constants,
            RANK=self.rank,
            WIDE=support.room_for(self.rank),
            BLOCK=kernels.LANES,
        )
        grid = layout.width, -(-width // 16)
        kernels.add_up_by_group[grid](partials, layout.firsts, self.rows, WIDTH=width, COLUMNS=16, BLOCK=128)

    @property
    def _momentum_correction(self) -> Scalar:
        return self.correction if self._averaged and self.group["momentum"] else 1.0

    def reads(self, grads: Sequence[Tensor]) -> bool:
        """Let kernels that were captured read other gradients; parameters and state are where they were. ``False`` if
        they cannot.
        """
        table = self.layout.again(grads) if all(g.dtype == self._dtype for g in grads) else None
        return table is not None and table.others is self.table.others and table.aligned == self.table.aligned

    def let_go(self) -> None:
        """Of the gradients."""
        _ = self._constants
        self.grads, self.columns = [], None

    def _act(self, answer: Answer | None, first: int, count: int, *, move: bool, carry: bool) -> None:
        layout, lr, mu = self.layout, self.lr, float(self.group["momentum"])
        if isinstance(lr, Tensor) and not lr.is_cuda and self.ok.is_cuda:
            lr = float(lr)  # it is at hand
        kernels = support.kernels()
        block = kernels.BLOCK if self.rank == 1 else kernels.BLOCK // 2  # of which each program holds all columns
        kernels.act[count, kernels.CHUNK // block](
            self.table.grads,
            self.groups,
            self.table.others,
            layout.chunks,
            layout.decays(self.decays),
            self.moment.clock,
            self.fractions,
            self.ok,
            *self._line(answer),
            self.taken,
            lr,
            layout.width,
            first,
            mu,
            self.intake,
            float(self.fictitious),
            *self._of_averages,
            **self._constants,
            AHEAD=self.looks_ahead,
            LINE=answer is not None and answer.slope is not None,
            CLAMP=answer is not None and answer.clamp,
            RATE_ON_DEVICE=isinstance(lr, Tensor),
            MOVE=move,
            CARRY=carry,
            AGAIN=answer is None,
            RANK=self.rank,
            WIDE=support.room_for(self.rank),
            BLOCK=block,
        )

    def _line(self, answer: Answer | None) -> tuple[Tensor, Tensor, Tensor]:
        """Start, slope and s of w, or anything."""
        if answer is None:
            return self.taken, self.taken, self.taken
        return (
            answer.start,
            answer.start if answer.slope is None else answer.slope,
            answer.start if answer.s is None else answer.s,
        )

    @cached_property
    def _dtype(self) -> torch.dtype:
        """Of the gradients."""
        return self.grads[0].dtype

    @cached_property
    def _of_averages(self) -> tuple[float, ...]:
        """log μ; ρ, 1 − ρ, which a kernel has too few digits for, and log ρ; ε; the share that one of N players has of
        the decay.
        """
        mu, keep, eps = self.group["momentum"], self.group["decay"], self.group["eps"]
        return _log(mu), float(keep), float(1 - keep), _log(keep), float(eps), 1 / self.fictitious

    @cached_property
    def _constants(self) -> dict[str, Any]:
        """What kernels are built for."""
        kernels = support.kernels()
        return {
            "GRAD": kernels.KINDS[self._dtype],
            "PARAM": kernels.KINDS[self.params[0].dtype],
            "SIGN": self.sign,
            "ADAPTIVE": self._adaptive,
            "CORRECTED": bool(self.group["bias_correction"] and self.group["decay"]),
            "MOMENTUM": bool(self.group["momentum"]),
            "AVERAGED": self._averaged,
            "DECAY": self.has_decay,
            "DECOUPLED": self.has_decoupled_decay,
            "ALIGNED": self._aligned,
            "CHUNK": kernels.CHUNK,
        }


def _log(rate: float) -> float:
    return math.log(rate) if rate else 0.0

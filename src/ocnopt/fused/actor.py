"""Acting by fused kernels. What each quantity is, :mod:`ocnopt.bucket` and :mod:`ocnopt.curvature.adaptive` say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ocnopt import whole_step
from ocnopt.actor import Actor, Answer, Products, Scalar
from ocnopt.curvature import BY_NAME, Adaptive
from ocnopt.fused import support
from ocnopt.fused.tables import Layout, Table
from ocnopt.gradients import Explicit
from ocnopt.moment import Moment
from ocnopt.shelves import Shelf


@dataclass
class FusedActor(Actor):
    """State goes on when all have acted; where γθ is a part of the linear cost, when each does, since it is θ before
    the step that counts.
    """

    grads: list[Tensor]
    columns: list[Tensor] | None  # of groups of samples, [r, *shape] of each parameter; None: all are one
    fractions: Tensor  # ν = n/B
    layout: Layout
    sign: int  # −1 where the loss is maximised
    ok: Tensor = field(init=False)
    fine: Tensor = field(init=False)  # the same as a boolean
    table: Table = field(init=False)
    _aligned: bool = field(init=False)  # see Table; of the columns, too
    groups: Tensor = field(init=False)  # [parameters]: addresses of the columns, or anything
    rows: Tensor = field(init=False)  # [parameters, r² + 2r + 1]: G^T C^{-1} G, G^T C^{-1} ℓ, G^T γθ, squares
    correction: Tensor = field(init=False)  # 1 − μ^t
    taken: Tensor = field(init=False)  # [parameters, r]: the weights that they have acted with

    @classmethod
    def of(
        cls, shelf: Shelf, grads: list[Tensor], columns: list[Tensor] | None, fractions: Tensor, maximize: bool
    ) -> FusedActor | None:
        """One that has looked at the gradients; or ``None``, where that cannot be done for once."""
        if _starts_late(shelf) or len({g.dtype for g in grads}) > 1:
            return None
        if shelf.layout is None:
            shelf.layout = Layout(shelf.parts(shelf.params), support.kernels().CHUNK)
        moment = Moment(shelf.states[0]["step"], torch.float32, (shelf.group["momentum"], shelf.group["decay"]))
        if columns is not None:
            columns = [_in_order(G, p) for G, p in zip(columns, shelf.params, strict=True)]
        actor = cls(shelf, moment, grads, columns, fractions, shelf.layout, -1 if maximize else 1)
        return actor if actor._look() else None

    @property
    def rank(self) -> int:
        return len(self.fractions)

    def _look(self) -> bool:
        """Form the products of the recursion."""
        layout, table = self.layout, self._table(self.grads)
        if table is None:
            return False
        columns = (table.grads, True) if self.columns is None else layout.columns(self.columns)
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

    def _table(self, grads: Sequence[Tensor]) -> Table | None:
        momentum = self.zeros_like_parameters("momentum") if self.group["momentum"] else None
        moments = self.zeros_like_parameters("second_moment") if self._adaptive else None
        return self.layout.table(grads, self.shelf.parts(self.params), momentum, moments)

    def reads(self, grads: Sequence[Tensor]) -> bool:
        """Let kernels that were captured read other gradients. ``False`` where they cannot, or where anything else is
        not where it was.
        """
        table = self._table(grads) if all(g.dtype == self._dtype for g in grads) else None
        return table is not None and table.others is self.table.others and table.aligned == self.table.aligned

    def let_go(self) -> None:
        """Of the gradients."""
        _ = self._constants
        self.grads, self.columns = [], None

    @property
    def _momentum_correction(self) -> Scalar:
        return self.correction if self._averaged and self.group["momentum"] else 1.0

    @property
    def squares(self) -> Tensor:
        """``[parameters]``: g^T g; of groups, with those of the columns."""
        return self.rows[:, -1]

    @property
    def settled_last(self) -> frozenset[str]:
        return frozenset({"step"} if self.has_decay else {"step", "momentum", "second_moment"})

    # --- the backward pass of dynamic programming ---

    def measure(self, a: Tensor | None) -> None:
        assert a is None, "statistics that are weighted are none of these kernels' business"

    def products(self) -> Products:
        rows = torch.where(self.fine, self.rows, 0)
        self.shelf.owners.sum_([rows])
        r, costly = self.rank, self.group["momentum"] or self.has_decay
        K, u, free = rows[:, : r * r].unflatten(1, (r, r)), rows[:, r * r :][:, :r], rows[:, r * r + r :][:, :r]
        return Products(K, u if costly else None, free if self.has_decoupled_decay else None)

    # --- acting ---

    def apply(self, answer: Answer) -> None:
        self.taken = self.rows.new_empty(len(self.rows), self.rank)
        self._act(answer, 0, self.layout.total, move=True, carry=True)

    def coast(self) -> None:
        self.taken = self.rows.new_zeros(len(self.rows), self.rank)

    @property
    def _carries(self) -> bool:
        """Does state go on while they act? A second pass that is captured cannot fail."""
        return self.has_decay or whole_step.underway()

    def steer(self, seats: Sequence[int], answer: Answer) -> None:
        for first, count in self.shelf.chunks(seats):
            self._act(answer, first, count, move=True, carry=self._carries)

    def settle(self) -> None:
        if not self._carries and (self.group["momentum"] or self._adaptive):
            self._act(None, 0, self.layout.total, move=False, carry=True)

    def _act(self, answer: Answer | None, first: int, count: int, *, move: bool, carry: bool) -> None:
        """``answer``: ``None`` if they have acted before, and are to do it again in all that follows from it."""
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
    def _adaptive(self) -> bool:
        return isinstance(self.shelf.curvature, Adaptive)

    @property
    def _averaged(self) -> bool:
        """Is the momentum an average, and corrected as such?"""
        return bool(self.group["ema"] and self.group["bias_correction"])

    @cached_property
    def _of_averages(self) -> tuple[float, float, float, float, float]:
        """log μ; ρ, its logarithm, ε, and the share that one of N players has of the decay."""
        mu, keep, eps = self.group["momentum"], self.group["decay"], self.group["eps"]
        return _log(mu), float(keep), _log(keep), float(eps), 1 / self.fictitious

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


def why_not(shelf: Shelf, rank: int, paper: bool, alone: bool) -> str | None:
    """Why the players of a shelf do not act by fused kernels. ``alone``: has this process the whole batch?"""
    if rank > support.MOST_GROUPS:
        return f"rank must be {support.MOST_GROUPS} or less"
    if rank > 1 and shelf.kind is not Explicit:
        return "its gradient is not split by groups of samples"
    if shelf.kind is Explicit and not alone:
        return "groups of samples are spread over several processes"
    if paper:
        return "bellman must be 'consistent'"
    if shelf.curvature is not BY_NAME["identity"] and shelf.curvature is not BY_NAME["adaptive"]:
        return "curvature must be 'identity' or 'adaptive'"
    if shelf.params[0].dtype not in support.KINDS:
        return f"parameters of {shelf.params[0].dtype} are not supported"
    return support.why_not_on(shelf.params[0].device)


def _in_order(G: Tensor, p: Tensor) -> Tensor:
    """Group gradients, each laid out as its parameter is: with channels last, say."""
    strides = p.numel(), *p.stride()
    return (
        G if G.stride() == strides else torch.empty_strided(G.shape, strides, dtype=G.dtype, device=G.device).copy_(G)
    )


def _log(rate: float) -> float:
    return math.log(rate) if rate else 0.0


def _starts_late(shelf: Shelf) -> bool:
    """Is a second moment missing though its clock has been running, after a change of curvature? Then it is right at
    once, which these kernels know nothing of.
    """
    if shelf.clock_is_new or not isinstance(shelf.curvature, Adaptive):
        return False
    return any("second_moment" not in state for state in shelf.states)

"""Acting in general: any curvature, any rank. Whatever is done to the players is one multi-tensor operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ocnopt.actor import Actor, Answer, Products
from ocnopt.curvature import Metric
from ocnopt.curvature.tally import Tally
from ocnopt.distributed import World
from ocnopt.gradients import GroupGradients
from ocnopt.groups import Part
from ocnopt.layers.base import Call
from ocnopt.linalg import full_precision
from ocnopt.multi import copied
from ocnopt.phases import CURVATURE


@dataclass
class Bucket(Actor):
    gradients: GroupGradients
    calls: Mapping[int, list[tuple[Part, list[Call]]]]  # id(player) → forward passes → calls of its module
    tallies: Mapping[int, list[Tally]]  # id(player) → forward passes whose calls have been added up
    seen: Set[int]  # ids of the players of which any process has calls
    world: World = field(default_factory=World)  # the processes that share the batch
    metric: Metric | None = field(default=None)
    preconditioned: GroupGradients | None = field(default=None)  # C^{-1} G
    stride: Tensor | None = field(default=None)  # what directions are multiplied by: η, or 0 in a step without a trace
    pending: list[Tensor] | None = field(default=None)  # what is planned to be taken off parameters of few digits
    coasted: list[Tensor] | None = field(default=None)  # the momentum to come, where it depends on the parameters
    steered: list[tuple[list[int], Tensor]] = field(default_factory=list)  # which parameters, and with which weights

    @CURVATURE
    def measure(self, a: Tensor | None) -> None:
        with full_precision():
            self.metric = self.shelf.curvature.measure(self, a)

    @full_precision()
    def products(self) -> Products:
        assert self.metric is not None
        Gi = self.preconditioned = self.gradients.preconditioned(self.metric)
        u, share, cost = None, 1.0, self.linear_cost()
        if cost is None:
            K = self.gradients.kernels(Gi)
        else:
            vectors, share = cost
            K, u = self.gradients.products(Gi, vectors)
        free = self.decoupled_drift()
        self.shelf.owners.sum_([each for each in (K, u, free) if each is not None])
        return Products(K, u, free, share)

    def force(self, a: Tensor | None) -> list[Tensor]:
        """Q_θ = G a + γθ (a = 1 in consistent mode): the gradient of the Bellman objective.

        One of N fictitious players holds θ/N, and with it its share of the decay. Zero in a step without a trace.
        """
        q = self.gradients.total() if a is None else self.gradients.mix(a)
        if self.has_decay:
            q = list(torch._foreach_add(q, torch._foreach_mul(self._decayed(), self.ok), alpha=1 / self.fictitious))
        return q

    def _with_decay(self, q: list[Tensor]) -> list[Tensor]:
        return list(torch._foreach_add(q, self._decayed())) if self.has_decay else q

    def _decayed(self) -> list[Tensor]:
        """γθ."""
        return list(torch._foreach_mul([p.to(self.ok.dtype) for p in self.shelf.parts(self.params)], self.decays))

    def linear_cost(self) -> tuple[list[Tensor], float] | None:
        """ℓ = γθ + (what is left of the momentum): vectors and what they are to be multiplied by, or ``None`` if there
        is no ℓ.
        """
        mu = self.group["momentum"]
        if not mu:
            return (self._decayed(), 1.0) if self.has_decay else None
        scale, m = self.momentum_cost, self.zeros_like_parameters("momentum")
        if not self.has_decay:
            return m, scale
        return list(torch._foreach_add(self._decayed(), m, alpha=scale)), 1.0

    def decoupled_drift(self) -> Tensor | None:
        """G^T γθ, ``[rows, r]``, of a decoupled weight decay."""
        if not self.has_decoupled_decay:
            return None
        return self.gradients.project(self._decayed())

    # --- acting ---

    def apply(self, answer: Answer) -> None:
        self.preconditioned, N, w = None, self.fictitious, answer.w
        m, ahead = self.zeros_like_parameters("momentum") if self.group["momentum"] else None, self.looks_ahead
        if m is not None:
            self._coast(m)
            (self.gradients.add_to if ahead else self.gradients.give_to)(m, w, N * self.intake)
        if m is not None and not ahead:
            change = self._planned(m, own=False)
        else:
            direction = self._with_decay(self.gradients.mix(N * w))
            if m is not None:
                torch._foreach_add_(direction, m, alpha=self.group["momentum"])
            change = self._planned(direction, own=True)
        torch._foreach_sub_(self.shelf.parts(self.params), change)

    def coast(self) -> None:
        """The part of :meth:`apply` that the policy has no say in, momentum and decay: for all layers at once, before
        the first one acts. Nobody looks at a layer before it does.

        The momentum stays as it is until :meth:`settle`, so that there is nothing to put back if a second pass fails.
        """
        m, mu = None, self.group["momentum"]
        if mu:
            m = copied(self.zeros_like_parameters("momentum"))
            self._coast(m)
            self.coasted = m if self.has_decay else None  # the parameters are about to move
        direction = m
        if m is None or self.looks_ahead:
            direction = self._decayed() if self.has_decay else None
        if m is not None and self.looks_ahead:
            drift = list(torch._foreach_mul(m, mu))
            direction = drift if direction is None else list(torch._foreach_add(direction, drift))
        change = self._planned(direction, own=direction is not self.coasted)
        if self._few_digits:
            self.pending = change
        else:
            torch._foreach_sub_(self.shelf.parts(self.params), change)

    def steer(self, seats: Sequence[int], answer: Answer) -> None:
        """The part that it has."""
        selected = self.shelf.select(seats)
        if selected is None:
            return
        assert self.preconditioned is not None
        assert self.stride is not None
        few, index = selected
        mu, theirs, w = self.group["momentum"], few.parts(few.params), answer.w
        taken = self.fictitious * (self.intake if mu and not self.looks_ahead else 1 + mu)
        gradients = self.preconditioned.select(index)
        if self.pending is None:
            gradients.add_to(theirs, w, -taken, self.stride)
        else:
            change = [self.pending[i] for i in index]
            gradients.add_to(change, w, taken, self.stride)
            torch._foreach_sub_(theirs, change)
        self.steered.append((index, w))

    def settle(self) -> None:
        self.pending = self.preconditioned = None
        if not self.group["momentum"]:
            return
        m = self.zeros_like_parameters("momentum")
        if self.coasted is None:
            self._coast(m)
        else:
            torch._foreach_copy_(m, self.coasted)
        self.gradients.add_each(m, self.steered, self.fictitious * self.intake)

    @property
    def _few_digits(self) -> bool:
        """Are the parameters of lower precision than the arithmetic? Then they are moved once in a step."""
        return self.params[0].dtype != self.ok.dtype

    @property
    def _coasting(self) -> Tensor:
        """What is left of the momentum: all of it in a step that does not count."""
        return torch.rsub(self.ok, 1, alpha=1 - self.group["momentum"])

    def _coast(self, m: list[Tensor]) -> None:
        """The momentum, one step later, if there were no gradient."""
        torch._foreach_mul_(m, self._coasting)
        if self.has_decay:
            torch._foreach_add_(m, torch._foreach_mul(self._decayed(), self.ok), alpha=self.intake)

    def _planned(self, direction: list[Tensor] | None, own: bool) -> list[Tensor]:
        """What a direction, and a decoupled decay, take off the parameters. ``own``: it may be overwritten."""
        assert self.metric is not None
        rate = self.ok * self.lr
        self.stride = rate / self._momentum_correction
        if direction is None:
            change = [torch.zeros_like(p, dtype=self.ok.dtype) for p in self.shelf.parts(self.params)]
        else:
            change = self.metric.solve(direction)
            if self.metric.is_new or (own and self.metric.is_identity):
                torch._foreach_mul_(change, self.stride)
            else:
                change = list(torch._foreach_mul(change, self.stride))
        if self.has_decoupled_decay:
            torch._foreach_add_(change, torch._foreach_mul(self._decayed(), rate))
        return change

    def select(self, seats: Sequence[int]) -> Bucket | None:
        """The players of some seats, or ``None``, as a bucket that nothing has been done to. Shares state with this."""
        selected = self.shelf.select(seats)
        if selected is None:
            return None
        few, index = selected
        return replace(self, shelf=few, gradients=self.gradients.select(index), steered=[])

"""The Gram form of group gradients: nothing is stored, kernels come from inputs and adjoints. Identity metric only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ocnopt.gradients import GroupGradients
from ocnopt.groups import Groups
from ocnopt.layers.base import Adapter, Call, spread
from ocnopt.multi import inner

if TYPE_CHECKING:
    from ocnopt.curvature.base import Metric


@dataclass
class GramRow:
    """One parameter of the Gram form, and the only call of its module."""

    adapter: Adapter
    call: Call
    name: str

    @cached_property
    def part(self) -> tuple[slice, ...]:
        """Outside of which its gradients are zero."""
        return self.adapter.parts(self.call).get(self.name, ())

    def whole(self, v: Tensor) -> Tensor:
        """A tensor of that part with zeros around it."""
        return spread(v, self.part, self.adapter.parameters(self.call.module)[self.name].shape)


@dataclass
class Gram(GroupGradients):
    """K = (X X^T) ∘ (H H^T) and its like, summed over groups; G w is one weighted weight gradient."""

    rows: list[GramRow]
    groups: Groups
    fractions: Tensor
    rests: list[Tensor] | None = None  # ρ, what ``p.grad`` has beyond the sum of the samples; None: nothing
    _mixed: tuple[Tensor, list[Tensor]] | None = field(default=None, repr=False)
    _selected: dict[tuple[int, ...], Gram] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, rows: list[GramRow], grads: Sequence[Tensor] | None, groups: Groups, fractions: Tensor) -> Gram:
        """``grads``: as those of :class:`Explicit`, but all or none."""
        gram = cls(rows, groups, fractions)
        if grads is not None:
            gram.rests = list(torch._foreach_sub(list(grads), gram.total()))
        return gram

    def _weighted(self, w: Tensor) -> list[Tensor]:
        """Σ_i w_i g_i of each parameter, where it is not zero: an ordinary weight gradient with weighted adjoints, one
        for each layer.
        """
        weights, found = self.groups.expand(w), {}
        for row in self.rows:
            if id(row.call) not in found:
                call = row.call.weighted(weights)
                found[id(row.call)] = row.adapter.part_gradients(call, Groups(self.groups.batch, 1))
        return [found[id(row.call)][row.name][0] for row in self.rows]

    def mix(self, w: Tensor) -> list[Tensor]:
        found = [row.whole(v) for row, v in zip(self.rows, self._weighted(w), strict=True)]
        if self.rests is None:
            return found
        share = (self.fractions * w).sum()
        return [whole + share * rest for whole, rest in zip(found, self.rests, strict=True)]

    def add_to(self, tensors: Sequence[Tensor], w: Tensor, scale: float = 1.0, stride: Tensor | None = None) -> None:
        if self._mixed is None or self._mixed[0] is not w:  # the momentum takes what the parameters have taken
            self._mixed = w, self._weighted(w) if self.rests is None else self.mix(w)
        for row, t, v in zip(self.rows, tensors, self._mixed[1], strict=True):
            t = t[row.part] if self.rests is None else t
            t.add_(v, alpha=scale) if stride is None else t.addcmul_(v, stride, value=scale)

    def preconditioned(self, metric: Metric) -> Gram:
        return self  # the identity metric, by construction

    def kernels(self, other: GroupGradients) -> Tensor:
        grams: dict[int, dict[str, Tensor]] = {}
        for row in self.rows:
            if id(row.call) not in grams:
                grams[id(row.call)] = row.adapter.grams(row.call)
        K = torch.stack([self.groups.sum_pairs(grams[id(row.call)][row.name]) for row in self.rows])
        if self.rests is None:
            return K
        cross = self._samples(self.rests)[:, :, None] * self.fractions
        shares = torch.outer(self.fractions, self.fractions)
        return K + cross + cross.mT + inner(self.rests, self.rests)[:, None, None] * shares

    def _samples(self, vectors: Sequence[Tensor]) -> Tensor:
        """``[rows, r]``: inner products with the samples' own gradients, without ρ."""
        pairs = zip(self.rows, vectors, strict=True)
        return torch.stack([self.groups.sum(row.adapter.project(row.call, {row.name: v})) for row, v in pairs])

    def project(self, vectors: Sequence[Tensor]) -> Tensor:
        samples = self._samples(vectors)
        return samples if self.rests is None else samples + inner(self.rests, vectors)[:, None] * self.fractions

    def select(self, parameters: Sequence[int]) -> Gram:
        key = tuple(parameters)
        if key not in self._selected:
            rests = None if self.rests is None else [self.rests[i] for i in parameters]
            self._selected[key] = Gram([self.rows[i] for i in parameters], self.groups, self.fractions, rests)
        return self._selected[key]

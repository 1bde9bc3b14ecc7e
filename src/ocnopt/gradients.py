"""The group gradients G_k of a bucket of parameters, in three forms that answer the same questions.

* :class:`Shared`: every group's gradient is its share of ``p.grad``. Exact at rank 1; above, the documented fallback.
* :class:`Explicit`: the r gradients are stored. r·P memory.
* :class:`Gram`: nothing is stored; kernels come from inputs and adjoints. Identity metric only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ocnopt.groups import Groups
from ocnopt.layers.base import Adapter, Call
from ocnopt.multi import inner

if TYPE_CHECKING:
    from ocnopt.curvature.base import Metric


#: up to so many tensors one operation each is as quick as two for all of them
_FEW = 4


class GroupGradients(ABC):
    """G: one column per group of samples, rows over the parameters of a bucket."""

    fractions: Tensor  # ν = n/B

    @abstractmethod
    def mix(self, w: Tensor) -> list[Tensor]:
        """G w, one new tensor a parameter."""

    def total(self) -> list[Tensor]:
        """G 1: the gradient."""
        return self.mix(self.fractions.new_ones(len(self.fractions)))

    def add_to(self, tensors: Sequence[Tensor], w: Tensor, scale: float = 1.0) -> None:
        """tensors ← tensors + scale · G w."""
        torch._foreach_add_(list(tensors), self.mix(w), alpha=scale)

    def give_to(self, tensors: Sequence[Tensor], w: Tensor, scale: float = 1.0) -> None:
        """The same, for the last time: the memory of the gradients may be used for it."""
        self.add_to(tensors, w, scale)

    @abstractmethod
    def preconditioned(self, metric: Metric) -> GroupGradients:
        """C^{-1} G."""

    @abstractmethod
    def kernels(self, other: GroupGradients) -> Tensor:
        """``[rows, r, r]``: G^T G' of each row (a parameter, or a whole layer in the Gram form)."""

    @abstractmethod
    def project(self, vectors: Sequence[Tensor]) -> Tensor:
        """``[rows, r]``: G^T v."""

    def products(self, other: GroupGradients, vectors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """G^T G' and G'^T v."""
        return self.kernels(other), other.project(vectors)

    @abstractmethod
    def select(self, parameters: Sequence[int]) -> GroupGradients:
        """The part that belongs to the named parameters."""


@dataclass
class Shared(GroupGradients):
    """G = p.grad · ν^T with ν = n/B."""

    grads: list[Tensor]  # copies
    fractions: Tensor
    squares: Tensor | None = None  # g^T g of each, where that is known

    def mix(self, w: Tensor) -> list[Tensor]:
        return list(torch._foreach_mul(self.grads, self._share(w)))

    def add_to(self, tensors: Sequence[Tensor], w: Tensor, scale: float = 1.0) -> None:
        if len(tensors) > _FEW:
            super().add_to(tensors, w, scale)
            return
        share = self._share(w)
        for t, g in zip(tensors, self.grads, strict=True):
            t.addcmul_(g, share, value=scale)

    def give_to(self, tensors: Sequence[Tensor], w: Tensor, scale: float = 1.0) -> None:
        torch._foreach_mul_(self.grads, self._share(w))
        torch._foreach_add_(list(tensors), self.grads, alpha=scale)
        self.grads = []

    def _share(self, w: Tensor) -> Tensor:
        """ν^T w."""
        return w.reshape(()) if w.numel() == 1 else torch.dot(self.fractions, w)

    def total(self) -> list[Tensor]:
        return self.grads

    def preconditioned(self, metric: Metric) -> Shared:
        return self if metric.is_identity else Shared(metric.solve(self.grads), self.fractions)

    def kernels(self, other: GroupGradients) -> Tensor:
        assert isinstance(other, Shared)
        known = self.squares if other is self else None
        return self._spread(self._spread(inner(self.grads, other.grads) if known is None else known))

    def products(self, other: GroupGradients, vectors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        assert isinstance(other, Shared)
        if other is self and self.squares is not None:
            return super().products(other, vectors)
        both = inner([*self.grads, *vectors], [*other.grads, *other.grads]).view(2, -1)  # in as few launches as one
        return self._spread(self._spread(both[0])), self._spread(both[1])

    def project(self, vectors: Sequence[Tensor]) -> Tensor:
        return self._spread(inner(self.grads, vectors))

    def _spread(self, rows: Tensor) -> Tensor:
        """``[..., r]``: over the groups."""
        return rows[..., None] if self.fractions.numel() == 1 else rows[..., None] * self.fractions

    def select(self, parameters: Sequence[int]) -> Shared:
        return Shared([self.grads[i] for i in parameters], self.fractions)


@dataclass
class Explicit(GroupGradients):
    """G stored: ``[r, *shape]`` for each parameter."""

    columns: list[Tensor]
    fractions: Tensor

    def mix(self, w: Tensor) -> list[Tensor]:
        return [torch.mv(_rows(G).T, w).view(G.shape[1:]) for G in self.columns]

    def add_to(self, tensors: Sequence[Tensor], w: Tensor, scale: float = 1.0) -> None:
        for t, G in zip(tensors, self.columns, strict=True):
            if t.is_contiguous():
                t.view(-1).addmv_(_rows(G).T, w, alpha=scale)
            else:
                t.add_(torch.mv(_rows(G).T, w).view(t.shape), alpha=scale)

    def preconditioned(self, metric: Metric) -> Explicit:
        return self if metric.is_identity else Explicit(metric.solve(self.columns), self.fractions)

    def kernels(self, other: GroupGradients) -> Tensor:
        assert isinstance(other, Explicit)
        pairs = zip(self.columns, other.columns, strict=True)
        return torch.stack([_rows(G) @ _rows(G2).T for G, G2 in pairs])

    def project(self, vectors: Sequence[Tensor]) -> Tensor:
        return torch.stack([_rows(G) @ v.reshape(-1) for G, v in zip(self.columns, vectors, strict=True)])

    def select(self, parameters: Sequence[int]) -> Explicit:
        return Explicit([self.columns[i] for i in parameters], self.fractions)

    @staticmethod
    def adding_up_to(grad: Tensor, columns: Tensor, fractions: Tensor) -> Tensor:
        """Spread over the groups whatever happened to ``p.grad`` after the backward pass (clipping, penalties)."""
        rest = grad - columns.sum(0)
        return torch.addr(_rows(columns), fractions, rest.reshape(-1)).reshape(columns.shape)


def _rows(G: Tensor) -> Tensor:
    """``[r, *shape] -> [r, P]``, also for a parameter that is a single number."""
    return G.reshape(len(G), -1)


@dataclass
class GramRow:
    """One parameter of the Gram form: the only call of its module, and ρ, what ``p.grad`` has beyond the sum of the
    samples.
    """

    adapter: Adapter
    call: Call
    name: str
    rest: Tensor


@dataclass
class Gram(GroupGradients):
    """K = (X X^T) ∘ (H H^T) and its like, summed over groups; G w is one weighted weight gradient."""

    rows: list[GramRow]
    groups: Groups
    fractions: Tensor

    @classmethod
    def of(cls, rows: list[GramRow], groups: Groups, fractions: Tensor) -> Gram:
        """``rest`` of the rows is ``p.grad`` here; the sum of the samples' gradients is taken off."""
        gram = cls(rows, groups, fractions)
        for row, whole in zip(rows, gram._weighted(torch.ones_like(fractions)), strict=True):
            row.rest = row.rest - whole
        return gram

    def _weighted(self, w: Tensor) -> list[Tensor]:
        """Σ_i w_i g_i of each parameter: an ordinary weight gradient with weighted adjoints, one for each layer."""
        weights, found = self.groups.expand(w), {}
        for row in self.rows:
            if id(row.call) not in found:
                call = row.call.weighted(weights)
                found[id(row.call)] = row.adapter.group_gradients(call, Groups(self.groups.batch, 1))
        return [found[id(row.call)][row.name][0] for row in self.rows]

    def mix(self, w: Tensor) -> list[Tensor]:
        share = (self.fractions * w).sum()
        return [whole + share * row.rest for whole, row in zip(self._weighted(w), self.rows, strict=True)]

    def preconditioned(self, metric: Metric) -> Gram:
        return self  # the identity metric, by construction

    def kernels(self, other: GroupGradients) -> Tensor:
        grams: dict[int, dict[str, Tensor]] = {}
        for row in self.rows:
            if id(row.call) not in grams:
                grams[id(row.call)] = row.adapter.grams(row.call)
        cross = self._samples([row.rest for row in self.rows])[:, :, None] * self.fractions
        square = inner([row.rest for row in self.rows], [row.rest for row in self.rows])
        K = [self.groups.sum(self.groups.sum(grams[id(row.call)][row.name]).T) for row in self.rows]
        shares = torch.outer(self.fractions, self.fractions)
        return torch.stack(K) + cross + cross.mT + square[:, None, None] * shares

    def _samples(self, vectors: Sequence[Tensor]) -> Tensor:
        """``[rows, r]``: inner products with the samples' own gradients, without ρ."""
        pairs = zip(self.rows, vectors, strict=True)
        return torch.stack([self.groups.sum(row.adapter.project(row.call, {row.name: v})) for row, v in pairs])

    def project(self, vectors: Sequence[Tensor]) -> Tensor:
        return self._samples(vectors) + inner([row.rest for row in self.rows], vectors)[:, None] * self.fractions

    def select(self, parameters: Sequence[int]) -> Gram:
        return Gram([self.rows[i] for i in parameters], self.groups, self.fractions)

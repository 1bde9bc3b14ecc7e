"""The group gradients G_k of a bucket of parameters, in three forms that answer the same questions.

* :class:`Shared`: every group's gradient is its share of ``p.grad``. Exact at rank 1; above, the documented fallback.
* :class:`Explicit`: the r gradients are stored. r·P memory.
* :class:`~ocnopt.gram.Gram`: nothing is stored; kernels come from inputs and adjoints. Identity metric only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ocnopt import whole_step
from ocnopt.layers.base import spread
from ocnopt.multi import inner

if TYPE_CHECKING:
    from ocnopt.curvature.base import Metric


#: up to so many tensors one operation each is as quick as two for all of them; on a CPU it always is quicker
_FEW = 4

#: gradients of at most so many numbers (biases, norms) are laid side by side
_SHORT = 2**12


class GroupGradients(ABC):
    """G: one column per group of samples, rows over the parameters of a bucket."""

    fractions: Tensor  # ν = n/B

    @abstractmethod
    def mix(self, w: Tensor) -> list[Tensor]:
        """G w, one new tensor a parameter."""

    def total(self) -> list[Tensor]:
        """G 1: the gradient."""
        return self.mix(self.fractions.new_ones(len(self.fractions)))

    def add_to(self, tensors: Sequence[Tensor], w: Tensor, scale: float = 1.0, stride: Tensor | None = None) -> None:
        """tensors ← tensors + scale · stride · G w."""
        torch._foreach_add_(list(tensors), self.mix(_times(w, stride)), alpha=scale)

    def give_to(self, tensors: Sequence[Tensor], w: Tensor, scale: float = 1.0) -> None:
        """The same, for the last time: the memory of the gradients may be used for it."""
        self.add_to(tensors, w, scale)

    def add_each(
        self, tensors: Sequence[Tensor], steered: Sequence[tuple[Sequence[int], Tensor]], scale: float = 1.0
    ) -> None:
        """The same with other weights for others of the parameters: which, and w."""
        for index, w in steered:
            self.select(index).add_to([tensors[i] for i in index], w, scale)

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


def _times(w: Tensor, stride: Tensor | None) -> Tensor:
    return w if stride is None else w * stride


@dataclass
class Shared(GroupGradients):
    """G = p.grad · ν^T with ν = n/B."""

    grads: list[Tensor]  # on a CPU not always copies
    fractions: Tensor
    squares: Tensor | None = None  # g^T g of each, where that is known

    def mix(self, w: Tensor) -> list[Tensor]:
        return list(torch._foreach_mul(self.grads, self._share(w)))

    def add_to(self, tensors: Sequence[Tensor], w: Tensor, scale: float = 1.0, stride: Tensor | None = None) -> None:
        if len(tensors) > _FEW and tensors[0].device.type != "cpu":
            super().add_to(tensors, w, scale, stride)
            return
        share = self._share(_times(w, stride))
        for t, g in zip(tensors, self.grads, strict=True):
            t.addcmul_(g, share, value=scale)

    def give_to(self, tensors: Sequence[Tensor], w: Tensor, scale: float = 1.0) -> None:
        if tensors[0].device.type == "cpu":  # where it takes one pass over them
            self.add_to(tensors, w, scale)
            return
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


class Columns(NamedTuple):
    """A gradient for each group, ``[r, *shape]`` of each parameter, or of the part outside of which all are zero."""

    tensors: list[Tensor]
    parts: Mapping[int, tuple[slice, ...]] = {}  # of these parameters: the others are whole

    def whole(self, params: Sequence[Tensor]) -> Columns:
        pairs = enumerate(zip(self.tensors, params, strict=True))
        return Columns([spread(G, self.parts.get(i, ()), p.shape) for i, (G, p) in pairs])


@dataclass
class Explicit(GroupGradients):
    """G stored: ``[r, *shape]`` for each parameter."""

    columns: list[Tensor]
    fractions: Tensor

    def mix(self, w: Tensor) -> list[Tensor]:
        return [torch.mv(_rows(G).T, w).view(G.shape[1:]) for G in self.columns]

    def add_to(self, tensors: Sequence[Tensor], w: Tensor, scale: float = 1.0, stride: Tensor | None = None) -> None:
        w = _times(w, stride)
        for t, G in zip(tensors, self.columns, strict=True):
            if t.is_contiguous():
                t.view(-1).addmv_(_rows(G).T, w, alpha=scale)
            else:
                t.add_(torch.mv(_rows(G).T, w).view(t.shape), alpha=scale)

    def add_each(
        self, tensors: Sequence[Tensor], steered: Sequence[tuple[Sequence[int], Tensor]], scale: float = 1.0
    ) -> None:
        weights = {i: w for index, w in steered for i in index}
        order = list(weights)
        short = [order[n] for n in together([_rows(self.columns[i]) for i in order])]
        if short:
            G = side_by_side([_rows(self.columns[i]) for i in short]).transpose(0, 1)
            w = torch.stack([weights[i] for i in short])
            mixed = torch.bmm(w[:, None], G)[:, 0].unbind()
            theirs = [tensors[i] for i in short]
            views = [v[: t.numel()].view(t.shape) for t, v in zip(theirs, mixed, strict=True)]
            torch._foreach_add_(theirs, views, alpha=scale)
        for i in (i for i in order if i not in short):
            self.select([i]).add_to([tensors[i]], weights[i], scale)

    def preconditioned(self, metric: Metric) -> Explicit:
        return self if metric.is_identity else Explicit(metric.solve(self.columns), self.fractions)

    def kernels(self, other: GroupGradients) -> Tensor:
        assert isinstance(other, Explicit)
        return row_products([_rows(G) for G in self.columns], [_rows(G) for G in other.columns])

    def project(self, vectors: Sequence[Tensor]) -> Tensor:
        return row_products([_rows(G) for G in self.columns], [v.reshape(1, -1) for v in vectors])[..., 0]

    def select(self, parameters: Sequence[int]) -> Explicit:
        return Explicit([self.columns[i] for i in parameters], self.fractions)

    @classmethod
    def of(cls, columns: Sequence[Tensor], grads: Sequence[Tensor], fractions: Tensor) -> Explicit:
        """Columns that add up to ``grads``: whatever happened to ``p.grad`` after the backward pass (clipping,
        penalties) is spread over the groups.
        """
        found = list(columns)
        short = together([_rows(G) for G in columns])
        if short:
            laid_out = side_by_side([_rows(columns[i]) for i in short])
            whole = side_by_side([grads[i].reshape(1, -1) for i in short])
            views = _adding_up_to(whole[0], laid_out, fractions).unbind(1)
            for i, G in zip(short, views, strict=True):
                found[i] = G[:, : columns[i][0].numel()].view(columns[i].shape)
        for i in (i for i in range(len(columns)) if i not in short):
            found[i] = _adding_up_to(grads[i], columns[i], fractions)
        return cls(found, fractions)


def _adding_up_to(grad: Tensor, columns: Tensor, fractions: Tensor) -> Tensor:
    rest = grad - columns.sum(0)
    return torch.addr(_rows(columns), fractions, rest.reshape(-1)).view(columns.shape)


def _rows(G: Tensor) -> Tensor:
    """``[r, *shape] -> [r, P]``, also for a parameter that is a single number."""
    return G.reshape(len(G), -1)


def is_short(rows: Tensor) -> bool:
    return rows.shape[1] <= _SHORT


def side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """``[r, n, width]`` of n tensors ``[r, P]``, filled up with zeros: one operation for all of them."""
    r, width = len(rows[0]), max(each.shape[1] for each in rows)
    zeros = _zeros(r * width, rows[0].dtype, rows[0].device)
    parts = (part for each in rows for part in (each, zeros[: r * (width - each.shape[1])].view(r, -1)))
    return torch.cat(list(parts), 1).view(r, len(rows), width)


def together(rows: Sequence[Tensor]) -> list[int]:
    """Which of these to multiply in one batch: where a launch takes longer than a copy, the short ones."""
    short = [i for i, each in enumerate(rows) if each.device.type != "cpu" and is_short(each)]
    return short if len(short) > 1 else []


@whole_step.remembered
def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=device)


def row_products(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """``[n, r, s]``: x y^T of each pair ``[r, P]`` and ``[s, P]``."""
    short, found = together(xs), dict[int, Tensor]()
    if short:
        x, y = (side_by_side([each[i] for i in short]).transpose(0, 1) for each in (xs, ys))
        found = dict(zip(short, torch.bmm(x, y.mT).unbind(), strict=True))
    return torch.stack([found[i] if i in found else x @ y.T for i, (x, y) in enumerate(zip(xs, ys, strict=True))])

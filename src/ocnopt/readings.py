"""Tensors as their readers took them in the first pass, so that a second one can tell what has changed.

A change is ⟨∂L/∂e, δe⟩ = ⟨∂L/∂e, e⟩ − ⟨∂L/∂e, ē⟩: with the second product formed in the backward pass, the tensor ē
itself need not be kept. Adjoints take the place of what autograd lets go.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from ocnopt.fused import dots
from ocnopt.layers.base import compute_dtype
from ocnopt.linalg import without_autocast

K = TypeVar("K")

_AS_IT_IS = nullcontext()


class Reading:
    """One edge of the data flow: a tensor on its way to one reader."""

    __slots__ = ("_dtype", "_sizes", "_spoilt", "_tensor", "_version", "adjoint", "before", "by_row")

    def __init__(self, tensor: Tensor, batch: int | None) -> None:
        """``batch``: how many samples there are, where products are wanted sample by sample."""
        self._tensor: Tensor | None = tensor.detach()
        self._version, self._dtype = tensor._version, tensor.dtype
        self.by_row = batch is not None and tensor.shape[:1] == (batch,)
        self._spoilt = False
        self.adjoint: Tensor | None = None  # ∂L/∂e through this edge
        self.before: Tensor | None = None  # ⟨∂L/∂e, ē⟩: ``[B]`` by row, or one number
        self._sizes: tuple[Tensor, Tensor] | None = None  # ⟨∂L/∂e, ∂L/∂e⟩ and ⟨ē, ē⟩

    @classmethod
    def of(cls, adjoint: Tensor, tensor: Tensor, batch: int | None) -> Reading:
        """One whose adjoint is known."""
        reading = cls(tensor, batch)
        reading.arrive(adjoint, last=True)
        return reading

    def arrive(self, adjoint: Tensor, last: bool, kept: bool = True, sized: bool = False) -> None:
        """Add an adjoint to those that came before.

        Args:
            last: no other can follow.
            kept: a second pass is going to be compared with it.
            sized: other readings are. That is all that it can be used for if it is not kept.
        """
        with torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS:  # as it hardly ever is in a backward pass
            self._arrive(adjoint, last, kept, sized)

    def _arrive(self, adjoint: Tensor, last: bool, kept: bool, sized: bool) -> None:
        self._spoilt = self.overwritten or self._tensor is None  # none was to follow, and one did
        if self._tensor is None:
            return
        before, adjoint = self._product(adjoint, self._tensor), adjoint.detach()
        self.before = before if self.before is None else self.before + before
        self.adjoint = adjoint if self.adjoint is None else self.adjoint + adjoint
        if last and sized:
            self._sizes = product(self.adjoint, self.adjoint), product(self._tensor, self._tensor)
        if last and not kept:
            self.adjoint = None
        if last:
            self._tensor = None

    def _product(self, adjoint: Tensor, tensor: Tensor) -> Tensor:
        """Row by row or whole."""
        return products(adjoint, tensor) if self.by_row else product(adjoint, tensor)

    def change(self, now: Tensor) -> Tensor:
        """⟨∂L/∂e, δe⟩, row by row or whole, of the tensor in another pass. Only if the adjoint was kept."""
        assert self.adjoint is not None
        assert self.before is not None
        if self.by_row:
            return products(self.adjoint, now) - self.before
        return product(self.adjoint, now, less=self.before)

    @property
    def shape(self) -> torch.Size:
        assert self.adjoint is not None
        return self.adjoint.shape

    @property
    def overwritten(self) -> bool:
        """Was the tensor changed in place before the backward pass came by, so that nothing can be told?"""
        return self._spoilt or (self._tensor is not None and self._tensor._version != self._version)

    def is_of(self, again: Tensor) -> bool:
        """Is that the tensor which was read, as far as the product tells?"""
        assert self.adjoint is not None
        size = product(self.adjoint, self.adjoint) * product(again, again)
        return bool(self.change(again).sum().abs() <= tolerance(self._dtype) * size.sqrt() + 1e-30)

    def agrees(self, other: Reading) -> bool:
        """Are both of the same tensor and adjoint, as far as products tell? The other must have been sized."""
        size, theirs = self._size, other._size
        if other._sizes is None or self.before is None or other.before is None:
            return not bool(size) and not bool(theirs)
        gap, within = (self.before.sum() - other.before.sum()).abs(), tolerance(self._dtype)
        same_product = gap <= within * (theirs * other._sizes[1]).sqrt() + 1e-30
        return same_size(size, theirs, self._dtype) and bool(same_product)

    @property
    def _size(self) -> Tensor:
        """⟨∂L/∂e, ∂L/∂e⟩, zero if none has arrived."""
        if self._sizes is not None:
            return self._sizes[0]
        return torch.zeros(()) if self.adjoint is None else product(self.adjoint, self.adjoint)

    def forget(self) -> None:
        """The adjoint: another backward pass starts from nothing."""
        self.adjoint, self.before, self._sizes, self._spoilt = None, None, None, False

    def tensors(self) -> list[Tensor]:
        """What it holds."""
        return [t for t in (self._tensor, self.adjoint, self.before, *(self._sizes or ())) if t is not None]


def tolerance(dtype: torch.dtype) -> float:
    """What two passes over the same numbers may differ by, relative to their size."""
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 5e-2)


def same_size(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Of two sums of squares."""
    return bool((found - expected).abs() <= 2 * tolerance(dtype) * expected + 1e-30)


def arrived(readings: Mapping[K, Reading]) -> dict[K, Reading]:
    """Those whose adjoints are there."""
    return {key: reading for key, reading in readings.items() if reading.adjoint is not None}


@without_autocast()
def product(x: Tensor, y: Tensor, less: Tensor | None = None) -> Tensor:
    """⟨x, y⟩, one number, in float32 at least; less another."""
    x, y = (t.reshape(-1) for t in _in_order(x, y))
    if (fused := dots.dot(x, y, less)) is not None:
        return fused
    found = torch.dot(*_wide(x, y))
    return found if less is None else found - less


@without_autocast()
def products(x: Tensor, y: Tensor) -> Tensor:
    """``[rows]``: ⟨x_i, y_i⟩."""
    x, y = _wide(*_in_order(x, y))
    width = x.numel() // max(len(x), 1)
    found: Tensor = torch.linalg.vecdot(x.reshape(len(x), width), y.reshape(len(x), width))
    return found


def _in_order(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """In the order of memory if they share it: a sum does not mind."""
    if x.dim() == 4 and all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, y)):
        return x.permute(0, 2, 3, 1), y.permute(0, 2, 3, 1)
    return x, y


def _wide(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """In the dtype of the result."""
    dtype = compute_dtype(torch.promote_types(x.dtype, y.dtype))
    return x.to(dtype), y.to(dtype)

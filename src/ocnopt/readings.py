"""Tensors as their readers took them in the first pass, so that a second one can tell what has changed.

A change is ⟨∂L/∂e, δe⟩ = ⟨∂L/∂e, e⟩ − ⟨∂L/∂e, ē⟩: with the second product formed in the backward pass, the tensor ē
itself need not be kept. Adjoints take the place of what autograd lets go. Where it takes longer to launch a kernel than
to run it, products wait for each other, up to the end of the backward pass or up to so much memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable

from ocnopt.fused import dots
from ocnopt.groups import Groups
from ocnopt.layers.base import compute_dtype
from ocnopt.layers.outer import PIECE
from ocnopt.linalg import without_autocast

K = TypeVar("K")


class Products:
    """Of many readings, formed together: one number after the other."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers


class Reading:
    """One edge of the data flow: a tensor on its way to one reader."""

    __slots__ = (
        "_before", "_dtype", "_sizes", "_spoilt", "_tensor", "_version", "_waits", "adjoint", "among", "by_row",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, batch: int | None) -> None:
        """``batch``: how many samples there are, where products are wanted sample by sample."""
        self._tensor: Tensor | None = tensor.detach()
        self._version, self._dtype = tensor._version, tensor.dtype
        self.by_row = batch is not None and tensor.shape[:1] == (batch,)
        self._spoilt = False
        self.adjoint: Tensor | None = None  # ∂L/∂e through this edge
        self._before: Tensor | None = None
        self.among: tuple[Products, int] | None = None  # where its product is, and from which number on
        self._waits: Waiting | None = None  # for others, with its product
        self._sizes: tuple[Tensor, Tensor] | None = None  # ⟨∂L/∂e, ∂L/∂e⟩ and ⟨ē, ē⟩

    @classmethod
    def of(cls, adjoint: Tensor, tensor: Tensor, batch: int | None) -> Reading:
        """One whose adjoint is known."""
        reading = cls(tensor, batch)
        reading.arrive(adjoint, last=True)
        return reading

    @property
    def there(self) -> bool:
        """Has anything arrived that a second pass can be compared with?"""
        if self._waits is not None:
            self._waits.settle()
        return self.adjoint is not None and (self._before is not None or self.among is not None)

    @property
    def before(self) -> Tensor | None:
        """⟨∂L/∂e, ē⟩: ``[B]`` by row, or one number."""
        if self._waits is not None:
            self._waits.settle()
        if self.among is None:
            return self._before
        assert self.adjoint is not None
        all_of_them, first = self.among[0].numbers, self.among[1]
        return all_of_them[first : first + len(self.adjoint)] if self.by_row else all_of_them[first]

    @before.setter
    def before(self, before: Tensor) -> None:
        self._before, self.among = before, None

    def arrive(
        self, adjoint: Tensor, last: bool, kept: bool = True, sized: bool = False, waiting: Waiting | None = None
    ) -> None:
        """Add an adjoint to those that came before.

        Args:
            last: no other can follow.
            kept: a second pass is going to be compared with it.
            sized: other readings are. That is all that it can be used for if it is not kept.
            waiting: others that it may wait for.
        """
        tensor = self._tensor
        if tensor is None:  # none was to follow, and one did
            self._spoilt = True
            return
        if tensor._version != self._version:
            self._spoilt = True
        if adjoint.requires_grad:  # as it hardly ever does
            adjoint = adjoint.detach()
        if waiting is not None and last and kept and self.adjoint is None and dots.can_wait(adjoint, tensor):
            self.adjoint, self._waits = adjoint, waiting
            waiting.add(self, tensor)
            return
        with torch.no_grad():
            self._add(adjoint, tensor, last, kept, sized)

    def _add(self, adjoint: Tensor, tensor: Tensor, last: bool, kept: bool, sized: bool) -> None:
        settled = None if self.adjoint is None else self.before
        before = products(adjoint, tensor) if self.by_row else product(adjoint, tensor)
        self.before = before if settled is None else settled + before
        self.adjoint = adjoint if self.adjoint is None else self.adjoint + adjoint
        if last and sized:
            self._sizes = product(self.adjoint, self.adjoint), product(tensor, tensor)
        if last and not kept:
            self.adjoint = None
        if last:
            self._tensor = None

    def settle(self, among: tuple[Products, int] | None = None) -> None:
        """It has waited. ``among``: where its product is, if that has been formed with others."""
        tensor, self._tensor, self._waits = self._tensor, None, None
        if tensor is None or self.adjoint is None:  # forgotten meanwhile
            return
        if tensor._version != self._version:
            self._spoilt = True
        self.among = among
        if among is None:
            self._before = products(self.adjoint, tensor) if self.by_row else product(self.adjoint, tensor)

    def pair(self) -> dots.Pair | None:
        """Whose product it waits for, where a kernel can form it with others."""
        x, y = self.adjoint, self._tensor
        if x is None or y is None or not dots.in_same_order(x, y):
            return None
        return dots.Pair(x, y, x.shape[0] if self.by_row else 0)

    def change(self, now: Tensor) -> Tensor:
        """⟨∂L/∂e, δe⟩, row by row or whole, of the tensor in another pass. Only if the adjoint was kept."""
        adjoint, before = self.adjoint, self.before
        assert adjoint is not None
        assert before is not None
        return products(adjoint, now) - before if self.by_row else product(adjoint, now, less=before)

    def changes(
        self, now: Tensor, groups: Groups | None, scale: Tensor | None, sign: float, plus: Tensor | None
    ) -> Tensor | None:
        """The same by groups of rows, scaled, and with others ``plus`` it, where there is a kernel for that."""
        assert self.adjoint is not None
        assert self.before is not None
        return dots.changes(self.adjoint, now, self.before, groups, scale, sign, plus)

    @property
    def shape(self) -> torch.Size:
        assert self.adjoint is not None
        return self.adjoint.shape

    @property
    def overwritten(self) -> bool:
        """Was the tensor changed in place before the backward pass came by, so that nothing can be told?"""
        return self._spoilt or (self._tensor is not None and self._tensor._version != self._version)

    def is_of(self, again: Tensor) -> bool | None:
        """Is that the tensor which was read, as far as the product tells? ``None``: it is no number."""
        assert self.adjoint is not None
        assert self.before is not None
        own, before = product(self.adjoint, self.adjoint), self.before.sum()
        if not _are_numbers(own, before):
            return None
        size = own * product(again, again)
        return bool(self.change(again).sum().abs() <= tolerance(self._dtype) * size.sqrt() + 1e-30)

    def agrees(self, other: Reading) -> bool | None:
        """Are both of the same tensor and adjoint, as far as products tell? The other must have been sized. ``None``:
        they are no numbers.
        """
        size, theirs = self._size, other._size
        if other._sizes is None or self.before is None or other.before is None:
            return not bool(size) and not bool(theirs) if _are_numbers(size) else None
        before = self.before.sum()
        if not _are_numbers(size, before):
            return None
        gap, within = (before - other.before.sum()).abs(), tolerance(self._dtype)
        same_product = gap <= within * (theirs * other._sizes[1]).sqrt() + 1e-30
        return bool(same_size(size, theirs, self._dtype)) and bool(same_product)

    @property
    def _size(self) -> Tensor:
        """⟨∂L/∂e, ∂L/∂e⟩, zero if none has arrived."""
        if self._sizes is not None:
            return self._sizes[0]
        return torch.zeros(()) if self.adjoint is None else product(self.adjoint, self.adjoint)

    def forget(self) -> None:
        """The adjoint: another backward pass starts from nothing."""
        self.adjoint, self._before, self.among, self._sizes, self._spoilt = None, None, None, None, False
        if self._waits is not None:
            self._tensor, self._waits = None, None

    def tensors(self) -> list[Tensor]:
        """What it holds."""
        before = self._before if self.among is None else self.among[0].numbers
        return [t for t in (self._tensor, self.adjoint, before, *(self._sizes or ())) if t is not None]


#: how many bytes of tensors may wait: few enough not to be noticed
_HELD = 32 * 2**20


class Waiting:
    """Readings that wait for each other in a backward pass."""

    def __init__(self) -> None:
        self._task = -1  # the backward pass at whose end they are settled
        self._held: dict[Any, int] = {}  # bytes
        self._readings: dict[Any, list[Reading]] = {}  # by stream: what arrives there is complete there

    def add(self, reading: Reading, tensor: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            Variable._execution_engine.queue_callback(self.settle)
        stream = torch._C._cuda_getCurrentStream(tensor.device.index) if tensor.is_cuda else None
        self._readings.setdefault(stream, []).append(reading)
        self._held[stream] = held = self._held.get(stream, 0) + tensor.numel() * tensor.element_size()
        if held > _HELD:
            self._settle(stream)

    def settle(self) -> None:
        """All of them."""
        for stream in list(self._readings):
            self._settle(stream)

    def _settle(self, stream: Any) -> None:
        alike: dict[Any, list[tuple[Reading, dots.Pair]]] = {}
        self._held.pop(stream, None)
        with torch.no_grad():
            for reading in self._readings.pop(stream, ()):
                if (pair := reading.pair()) is None:
                    reading.settle()
                else:
                    alike.setdefault((pair.x.device, pair.x.dtype, pair.y.dtype), []).append((reading, pair))
            for group in alike.values():
                # in whatever order they came: for a graph everything is laid out by a pass before
                group.sort(key=lambda each: (each[1].x.numel(), each[1].rows))
                pairs = [pair for _, pair in group]
                numbers = dots.dots(pairs)
                shared, places = None if numbers is None else Products(numbers), dots.places(pairs)
                for (reading, _), first in zip(group, places, strict=True):
                    reading.settle(None if shared is None else (shared, first))


def tolerance(dtype: torch.dtype) -> float:
    """What two passes over the same numbers may differ by, relative to their size."""
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 5e-2)


def same_size(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool | None:
    """Of two sums of squares. ``None``: what is expected is no number."""
    if not _are_numbers(expected):
        return None
    return bool((found - expected).abs() <= 2 * tolerance(dtype) * expected + 1e-30)


def _are_numbers(*sums: Tensor) -> bool:
    """Neither too large nor NaN."""
    return all(bool(each.isfinite()) for each in sums)


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
    """``[rows]``: ⟨x_i, y_i⟩. Torch writes all numbers x_ij y_ij down, so some rows at a time.

    On a CPU as many as stay next to the cores: a mebibyte of them took 0.5 to 0.7 of the time of four (128 rows of
    6272 and 25088 numbers, one and two threads). Half of it took 0.8 to 0.9 of that on one thread, 1 to 1.3 on two.
    """
    x, y = _wide(*_in_order(x, y))
    width = x.numel() // max(len(x), 1)
    rows = max((2**18 if x.device.type == "cpu" else PIECE) // max(width, 1), 1)
    parts = zip(*(t.reshape(len(x), width).split(rows) for t in (x, y)), strict=True)
    found = [torch.linalg.vecdot(*part) for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found)


def _in_order(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """In the order of memory if they share it: a sum does not mind."""
    if x.dim() == 4 and all(t.is_contiguous(memory_format=torch.channels_last) for t in (x, y)):
        return x.permute(0, 2, 3, 1), y.permute(0, 2, 3, 1)
    return x, y


def _wide(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """In the dtype of the result."""
    dtype = compute_dtype(torch.promote_types(x.dtype, y.dtype))
    return x.to(dtype), y.to(dtype)

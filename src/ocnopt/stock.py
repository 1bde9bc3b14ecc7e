"""Memory that tensors leave behind, for the next ones of their size."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from weakref import finalize

import torch
from torch import Tensor

from ocnopt.multi import copied

#: bytes that are to be had at once: the process keeps as many anyway
_FEW = 2**16


class Stock:
    """For large tensors on a CPU that every step makes anew: pages that the process has given back to the system, and
    gets again, take longer than the numbers that are written into them.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}  # blocks, by their bytes
        self._idle: dict[int, int] = {}  # how many of them have been free since :meth:`tidy`, at least

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """As ``torch.empty``. Its memory is free again as soon as nobody holds it, or a view of it."""
        size = prod(shape) * dtype.itemsize
        if size < _FEW:
            return torch.empty(shape, dtype=dtype, device="cpu")
        free = self._free.setdefault(size, [])
        block = free.pop() if free else torch.empty(size, dtype=torch.uint8, device="cpu")
        self._idle[size] = min(self._idle.get(size, 0), len(free))
        lent = (ctypes.c_char * size).from_address(block.data_ptr())
        finalize(lent, free.append, block).atexit = False
        return torch.frombuffer(lent, dtype=dtype).view(shape)

    def copied(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies that are laid out alike."""
        if any(t.device.type != "cpu" for t in tensors):
            return copied(tensors)
        copies = [torch.empty_like(t) if t.nbytes < _FEW else self._like(t) for t in tensors]
        torch._foreach_copy_(copies, list(tensors))
        return copies

    def _like(self, t: Tensor) -> Tensor:
        found = self.empty((t.numel(),), t.dtype)
        strides = t.stride() if t.is_contiguous() else torch.empty_like(t, device="meta").stride()
        return found.as_strided(t.shape, strides)

    def tidy(self) -> None:
        """Once a step: let go of what it did not need."""
        for size, free in self._free.items():
            del free[: self._idle.get(size, 0)]
        self._free = {size: free for size, free in self._free.items() if free}
        self._idle = {size: len(free) for size, free in self._free.items()}

    @property
    def blocks(self) -> list[Tensor]:
        """Those that nobody holds."""
        return [block for free in self._free.values() for block in free]

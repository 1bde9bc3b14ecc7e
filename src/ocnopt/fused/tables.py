"""Where the numbers of the parameters of a shelf are, for kernels that run over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ocnopt import whole_step

#: shapes and strides of all parameters
Order = tuple[list[torch.Size], list[tuple[int, ...]]]


class Table(NamedTuple):
    """Addresses, for kernels."""

    grads: Tensor  # [parameters]; they are somewhere else at each step
    others: Tensor  # [columns, parameters]
    aligned: bool  # do all begin at multiples of 16 bytes, so that four numbers can be fetched at a time?


class Others(NamedTuple):
    """What a table says of parameters and state."""

    addresses: list[list[int]]
    orders: list[Order]
    sent: Tensor  # the addresses
    order: Order | None  # the same for all, and with nothing between numbers
    aligned: bool


class Addresses:
    """Where some tensors are, on the device: mostly where they were a step before."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._row = device, list[int]()
        self._sent: Tensor | None = None
        # for a graph to come: what it allocates itself holds other numbers at other times, and of the host it has none
        self._room: Tensor | None = None
        self._pinned: Tensor | None = None

    def of(self, row: list[int]) -> Tensor | None:
        """``None`` where a graph comes before an ordinary step, or right after another graph."""
        if whole_step.underway():  # the same whenever it runs
            found, self._room = self._room, None
            if found is not None:
                whole_step.keep(found)
                whole_step.afterwards(lambda: found.copy_(torch.tensor(row, device="cpu")))
            return found
        if whole_step.capturing():  # by somebody else: nobody says when that is over
            pinned, self._pinned = self._pinned, None
            whole_step.keep(pinned)
            return (
                None
                if pinned is None
                else pinned.copy_(torch.tensor(row, device="cpu")).to(self._device, non_blocking=True)
            )
        self.make_room(row)
        if self._sent is None or self._row != row:
            self._row, self._sent = row, sent(row, self._device)
        return self._sent

    def make_room(self, row: list[int]) -> None:
        """For a graph to come."""
        if whole_step.capturing():
            return
        if self._room is None:
            self._room = torch.empty(len(row), dtype=torch.int64, device=self._device)
        if self._pinned is None and self._device.type == "cuda":
            self._pinned = torch.empty(len(row), dtype=torch.int64, pin_memory=True)

    @property
    def has_room(self) -> bool:
        """For the graph that is being captured."""
        return (self._room if whole_step.underway() else self._pinned) is not None


def sent(rows: Sequence[object], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """To the device, without waiting for it: what is small is copied aside at once, and sent in its turn."""
    return torch.tensor(rows, dtype=dtype, device="cpu").to(device, non_blocking=True)


class Layout:
    """A list of parameters, in chunks."""

    def __init__(self, params: Sequence[Tensor], chunk: int) -> None:
        self.device, self.width, self._shapes = params[0].device, len(params), [p.shape for p in params]
        self.chunk = chunk
        counts = [-(-p.numel() // chunk) for p in params]
        self.ends = list(accumulate(counts, initial=0))
        rows = [(i, j, params[i].numel()) for i, count in enumerate(counts) for j in range(count)]
        self.chunks = sent(rows, self.device)  # [chunks, 3]: parameter, which chunk of it, where the parameter ends
        self.firsts = sent(self.ends, self.device)
        self._decays: tuple[list[float], Tensor] | None = None
        self._others: Others | None = None
        self._grads: tuple[list[int], Tensor] | None = None
        self._of_graphs, self._of_columns = Addresses(self.device), Addresses(self.device)

    @property
    def total(self) -> int:
        """How many chunks there are."""
        return self.ends[-1]

    def runs(self, index: Sequence[int]) -> list[tuple[int, int]]:
        """The chunks of some parameters: the first of each run of neighbours, and how many they are."""
        found: list[tuple[int, int]] = []
        for i in index:
            start, end = self.ends[i], self.ends[i + 1]
            if found and sum(found[-1]) == start:
                start = found.pop()[0]
            found.append((start, end - start))
        return found

    def decays(self, decays: list[float]) -> Tensor:
        """γ of each parameter, on the device."""
        if self._decays is None or self._decays[0] != decays:
            self._decays = list(decays), sent(decays, self.device, torch.float32)
        return self._decays[1]

    def table(self, grads: Sequence[Tensor], *others: Sequence[Tensor] | None) -> Table | None:
        """Of gradients, parameters and state, ``None`` for one that nobody is going to read. There is no table where
        the numbers of a parameter are not as many as they were, or not in the same order in all columns, or where
        state is not of float32.
        """
        addresses = [[*map(Tensor.data_ptr, column or ())] for column in others]
        orders = [_order(column or ()) for column in others]
        if self._others is None or self._others[:2] != (addresses, orders):
            rows = [row or [0] * self.width for row in addresses]
            aligned = not any(address % 16 for row in rows for address in row)
            self._others = Others(addresses, orders, sent(rows, self.device), self._order(*others), aligned)
        return self.again(grads)

    def again(self, grads: Sequence[Tensor]) -> Table | None:
        """The last one, with other gradients."""
        assert self._others is not None
        theirs = self._others.sent
        if self._others.order != _order(grads):
            return None
        mine = [*map(Tensor.data_ptr, grads)]
        aligned = self._others.aligned and not any(address % 16 for address in mine)
        if whole_step.capturing() and not whole_step.pointing():
            found = self._of_graphs.of(mine)
        else:
            found = self._pointing_to(mine)
            self._of_graphs.make_room(mine)
        whole_step.keep(self.chunks, self.firsts, self._decays, theirs)
        return None if found is None else Table(found, theirs, aligned)

    def still_there(self, index: Sequence[int], params: Sequence[Tensor]) -> bool:
        """Are these parameters where the last table says, and as it says?"""
        assert self._others is not None
        addresses, (_, strides) = self._others.addresses[0], self._others.orders[0]
        pairs = zip(index, params, strict=True)
        return all((addresses[i], strides[i]) == (p.data_ptr(), p.stride()) for i, p in pairs)

    def columns(self, columns: Sequence[Tensor]) -> tuple[Tensor, bool] | None:
        """The addresses of group gradients, ``[r, *shape]``, that are one after another, each in the order of its
        parameter, and whether all are aligned; ``None`` where they are not.
        """
        assert self._others is not None
        sizes, strides = self._others.order or ([], [])
        numbers = [size.numel() for size in sizes]
        orders = [(G.dtype, G.shape[1:], G.stride()) for G in columns]
        if orders != [(torch.float32, s, (n, *t)) for s, n, t in zip(sizes, numbers, strides, strict=True)]:
            return None  # of another precision, say
        row = [*map(Tensor.data_ptr, columns)]
        found = self._of_columns.of(row)
        aligned = not any(address % 16 for address in row) and not any(n % 4 for n in numbers)
        return None if found is None else (found, aligned)

    def _pointing_to(self, row: list[int]) -> Tensor:
        """In the same place at each step, for graphs that read it there."""
        if self._grads is None:
            self._grads = row, sent(row, self.device)
        elif self._grads[0] != row:
            self._grads = row, self._grads[1].copy_(torch.tensor(row, device="cpu"), non_blocking=True)
        whole_step.keep(self._grads)
        return self._grads[1]

    def _order(self, params: Sequence[Tensor] | None, *state: Sequence[Tensor] | None) -> Order | None:
        """Shapes and strides of the parameters, if they are the same in all columns, and nothing is between numbers."""
        known = [column for column in state if column is not None]
        orders = [_order(column) for column in (params or (), *known)]
        wide = all(t.dtype == torch.float32 for column in known for t in column)
        alike = all(each == orders[0] for each in orders) and orders[0][0] == self._shapes
        return orders[0] if wide and alike and all(map(_is_dense, params or ())) else None


def laid_out(G: Tensor, p: Tensor) -> Tensor:
    """Group gradients, each as its parameter is: with channels last, say."""
    strides = p.numel(), *p.stride()
    if G.stride() == strides:
        return G
    return torch.empty_strided(G.shape, strides, dtype=G.dtype, device=G.device).copy_(G)


def _is_dense(t: Tensor) -> bool:
    """Numbers are one after another, in whatever order of the dimensions."""
    next_stride = 1
    for stride, size in sorted((stride, size) for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1):
        if stride != next_stride:
            return False
        next_stride *= size
    return True


def _order(tensors: Sequence[Tensor]) -> Order:
    return [*map(Tensor.size, tensors)], [*map(Tensor.stride, tensors)]

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


class Layout:
    """A list of parameters, in chunks."""

    def __init__(self, params: Sequence[Tensor], chunk: int) -> None:
        self.device, self.width, self._shapes = params[0].device, len(params), [p.shape for p in params]
        counts = [-(-p.numel() // chunk) for p in params]
        self.ends = list(accumulate(counts, initial=0))
        rows = [(i, j, params[i].numel()) for i, count in enumerate(counts) for j in range(count)]
        self.chunks = self._sent(rows)  # [chunks, 3]: parameter, which chunk of it, where the parameter ends
        self.firsts = self._sent(self.ends)
        self._decays: tuple[list[float], Tensor] | None = None
        self._others: tuple[list[list[int]], Tensor, Order | None, bool] | None = None
        self._grads: tuple[list[int], Tensor] | None = None
        self._columns: tuple[list[int], Tensor] | None = None
        self._pinned: list[Tensor] = []  # memory for the tables of a graph, which can take none by itself

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
            self._decays = list(decays), self._sent(decays)
        return self._decays[1]

    def table(self, grads: Sequence[Tensor], *others: Sequence[Tensor] | None) -> Table | None:
        """Of gradients, parameters and state, ``None`` for one that nobody is going to read. There is no table where
        the numbers of a parameter are not as many as they were, or not in the same order in all columns, or where
        state is not of float32.
        """
        addresses = [[*map(Tensor.data_ptr, column or ())] for column in others]
        if self._others is None or self._others[0] != addresses:
            rows = [row or [0] * self.width for row in addresses]
            aligned = not any(address % 16 for row in rows for address in row)
            self._others = addresses, self._sent(rows), self._order(*others), aligned
        _, sent, order, aligned = self._others
        if order != _order(grads):
            return None
        mine = [*map(Tensor.data_ptr, grads)]
        aligned = aligned and not any(address % 16 for address in mine)
        if whole_step.capturing():
            whole_step.keep(self.chunks, self.firsts, self._decays, sent)
            if not whole_step.pointing():
                return Table(self._sent_by_graph(mine), sent, aligned)
        else:
            self._pin()
        return Table(self._pointing_to(mine), sent, aligned)

    def columns(self, columns: Sequence[Tensor]) -> list[int] | None:
        """The addresses of group gradients, ``[r, *shape]``, that are one after another, each in the order of its
        parameter; ``None`` where they are not.
        """
        assert self._others is not None
        order = self._others[2] or []
        alike = [
            G.dtype == torch.float32 and G.shape[1:] == shape and G.stride() == (shape.numel(), *strides)
            for G, (shape, strides) in zip(columns, order, strict=True)
        ]
        return [G.data_ptr() for G in columns] if all(alike) else None

    def sent_columns(self, row: list[int]) -> Tensor:
        """Of group gradients, which a graph has in the same place at each step."""
        if whole_step.capturing():
            return self._sent_by_graph(row)
        if self._columns is None or self._columns[0] != row:
            self._columns = row, self._sent(row)
        return self._columns[1]

    def _pin(self) -> None:
        """For gradients, and for those of groups."""
        while len(self._pinned) < 2 and self.device.type == "cuda":
            self._pinned.append(torch.empty(self.width, dtype=torch.int64, pin_memory=True))

    def _pointing_to(self, row: list[int]) -> Tensor:
        """In the same place at each step, for graphs that read it there."""
        if self._grads is None:
            self._grads = row, self._sent(row)
        elif self._grads[0] != row:
            self._grads = row, self._grads[1].copy_(torch.tensor(row), non_blocking=True)
        whole_step.keep(self._grads)
        return self._grads[1]

    def _sent(self, rows: Sequence[object]) -> Tensor:
        """On the device, without waiting for it: what is small is copied aside at once, and sent in its turn."""
        return torch.tensor(rows).to(self.device, non_blocking=True)

    def _sent_by_graph(self, row: list[int]) -> Tensor:
        """Whenever it runs."""
        if self.device.type != "cuda":
            return torch.tensor(row)
        assert self._pinned, "an ordinary step comes before one that is captured"
        pinned = self._pinned.pop()
        whole_step.keep(pinned)
        return pinned.copy_(torch.tensor(row)).to(self.device, non_blocking=True)

    def _order(self, params: Sequence[Tensor] | None, *state: Sequence[Tensor] | None) -> Order | None:
        """Shapes and strides of the parameters, if they are the same in all columns."""
        known = [column for column in state if column is not None]
        orders = [_order(column) for column in (params or (), *known)]
        wide = all(t.dtype == torch.float32 for column in known for t in column)
        alike = all(each == orders[0] for each in orders) and orders[0][0] == self._shapes
        return orders[0] if wide and alike else None


def _order(tensors: Sequence[Tensor]) -> Order:
    return [*map(Tensor.size, tensors)], [*map(Tensor.stride, tensors)]

"""Where the numbers of the parameters of a shelf are, for kernels that run over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ocnopt import whole_step

#: gradients come back to the same places, but for a few
_REMEMBERED = 32

Columns = Sequence[Sequence[Tensor] | None]


class Table(NamedTuple):
    addresses: Tensor  # [columns, parameters]
    alike: bool  # are the numbers of each parameter in the same order in all columns?
    aligned: bool  # do all begin at multiples of 16 bytes, so that four numbers can be fetched at a time?


class Layout:
    """A list of parameters, in chunks."""

    def __init__(self, numbers: Sequence[int], chunk: int, device: torch.device) -> None:
        """``numbers``: how many each parameter has."""
        self.device, self.width = device, len(numbers)
        counts = [-(-number // chunk) for number in numbers]
        self.ends = list(accumulate(counts, initial=0))
        rows = [
            (i, j, number) for i, (number, count) in enumerate(zip(numbers, counts, strict=True)) for j in range(count)
        ]
        self.chunks = _uploaded(torch.tensor(rows), device)  # [chunks, 3]: parameter, which chunk of it, its end
        self.firsts = _uploaded(torch.tensor(self.ends), device)
        self._decays: tuple[list[float], Tensor] | None = None
        self._tables: dict[object, Table] = {}
        self._pinned: Tensor | None = None  # memory for the table of a graph, which has none of its own

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
            self._decays = list(decays), _uploaded(torch.tensor(decays, dtype=torch.float32), self.device)
        return self._decays[1]

    def table(self, grads: Sequence[Tensor], *others: Sequence[Tensor] | None) -> Table:
        """Of all columns; ``None`` for one that nobody is going to read."""
        columns = [grads, *others]
        addresses = [t.data_ptr() for tensors in columns if tensors is not None for t in tensors]
        if whole_step.capturing():
            whole_step.keep(self.chunks, self.firsts, self._decays, self._pinned)
            return self._look_up(columns, addresses)
        if self._pinned is None and self.device.type == "cuda":
            self._pinned = torch.empty(len(columns), self.width, dtype=torch.int64, pin_memory=True)
        key = tuple(addresses), tuple([g.stride() for g in grads])
        if key not in self._tables:
            if len(self._tables) >= _REMEMBERED:
                self._tables.clear()
            self._tables[key] = self._look_up(columns, addresses)
        return self._tables[key]

    def _look_up(self, columns: Columns, addresses: Sequence[int]) -> Table:
        rows = [[0] * self.width if tensors is None else [t.data_ptr() for t in tensors] for tensors in columns]
        there = (tensors for tensors in columns if tensors is not None)
        alike = all(len({t.stride() for t in theirs}) == 1 for theirs in zip(*there, strict=True))
        aligned = not any(address % 16 for address in addresses)
        return Table(self._sent(torch.tensor(rows)), alike, aligned)

    def _sent(self, rows: Tensor) -> Tensor:
        if not whole_step.capturing():
            return _uploaded(rows, self.device)
        # a graph sends it again whenever it runs
        assert self._pinned is not None, "a step of this kind comes before its capture"
        pinned, self._pinned = self._pinned, None
        return pinned.copy_(rows).to(self.device, non_blocking=True)


def _uploaded(rows: Tensor, device: torch.device) -> Tensor:
    """Without waiting for the device."""
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows

"""Groups of samples: the columns of D_k and G_k.

A mini-batch of B samples is split into r contiguous groups; sample i is in group floor(i·r/B). The number of
groups is the *rank* of the Gauss-Newton term: r = 1 is the paper's Prop. 3, r = B is no approximation at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from ocnopt import whole_step


@dataclass(frozen=True)
class Groups:
    """``rank`` contiguous groups of ``batch`` rows (r > B means B), as equal as can be unless their sizes are given."""

    batch: int
    rank: int
    given: tuple[int, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.given is None:
            object.__setattr__(self, "rank", max(1, min(self.rank, self.batch)))

    @classmethod
    def of(cls, batch: int, rank: int | str) -> Groups:
        """``rank`` may be ``"full"``."""
        return cls(batch, batch if rank == "full" else int(rank))

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> Groups:
        usual = cls(sum(sizes), len(sizes))
        return usual if usual.sizes == list(sizes) else cls(sum(sizes), len(sizes), tuple(sizes))

    @cached_property
    def sizes(self) -> list[int]:
        """n_g, the number of rows of each group."""
        return [b - a for a, b in pairwise(self.starts)]

    @cached_property
    def starts(self) -> list[int]:
        """The first row of each group, and the end."""
        if self.given is not None:
            return list(accumulate(self.given, initial=0))
        # floor(i r / B) = g  <=>  ceil(g B / r) <= i < ceil((g+1) B / r)
        return [-(-g * self.batch // self.rank) for g in range(self.rank + 1)]

    @property
    def even(self) -> bool:
        return self.given is None and self.batch % self.rank == 0

    def of_rows(self, device: torch.device | str | None = None) -> Tensor:
        """The group of each row, ``[B]``."""
        return _layout(tuple(self.sizes), torch.device(device or "cpu"))[0]

    def fractions(self, like: Tensor) -> Tensor:
        """ν = n / B, ``[r]``, in the dtype and on the device of ``like``."""
        if self.even:  # no host data to copy, so no synchronisation on a GPU
            return _even(self.rank, like.dtype, like.device)
        rows = self.of_rows(like.device)
        ones = torch.full((self.batch,), 1.0 / max(self.batch, 1), dtype=like.dtype, device=like.device)
        return torch.zeros(self.rank, dtype=like.dtype, device=like.device).index_add_(0, rows, ones)

    def sum(self, rows: Tensor, positions: Sequence[int] = ()) -> Tensor:
        """Add up the rows of each group, and what is at all ``positions`` of a row, dimensions that the sum has not:
        ``[B, ...] -> [r, ...]``.
        """
        if self.even:
            groups = rows.reshape(self.rank, self.batch // self.rank, *rows.shape[1:])
            return groups.sum((1, *(dim + 1 for dim in positions)))
        rows = rows.sum(tuple(positions)) if positions else rows
        out = rows.new_zeros(self.rank, *rows.shape[1:])
        return out.index_add_(0, self.of_rows(rows.device), rows)

    def sum_pairs(self, matrix: Tensor) -> Tensor:
        """The same of rows and columns: ``[B, B] -> [r, r]``."""
        if self.even:
            size = self.rank, self.batch // self.rank
            return matrix.reshape(*size, *size).sum((1, 3))
        return self.sum(self.sum(matrix).T).T

    def split(self, rows: Tensor) -> Tensor:
        """One slab of rows per group: ``[B, ...] -> [r, max n, ...]``, short groups filled up with zeros."""
        if self.even:
            return rows.reshape(self.rank, self.batch // self.rank, *rows.shape[1:])
        group, place = _layout(tuple(self.sizes), rows.device)
        longest = max(self.sizes)
        out = rows.new_zeros(self.rank * longest, *rows.shape[1:]).index_copy_(0, group * longest + place, rows)
        return out.reshape(self.rank, longest, *rows.shape[1:])

    def expand(self, weights: Tensor) -> Tensor:
        """Give every row the weight of its group: ``[r] -> [B]``."""
        return weights[self.of_rows(weights.device)]


@whole_step.remembered
def _even(rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((rank,), 1.0 / rank, dtype=dtype, device=device)


@whole_step.remembered
def _layout(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """The group of each row, and its place there; copied to the device once."""
    rows = [(g, i) for g, n in enumerate(sizes) for i in range(n)]
    both = torch.tensor(rows, dtype=torch.long).reshape(-1, 2).T.contiguous().to(device)
    return both[0], both[1]


@dataclass(frozen=True)
class Part:
    """The rows of one forward pass among all the samples of a step: the groups from ``first`` on that they are in."""

    groups: Groups
    first: int
    rank: int  # of the whole

    def add(self, total: Tensor | None, columns: Tensor) -> Tensor:
        """Add columns of these groups to columns of all: ``[r, ...] + [own r, ...]``. May overwrite ``total``."""
        if len(columns) == self.rank:
            return columns if total is None else total + columns
        if total is None:
            total = columns.new_zeros(self.rank, *columns.shape[1:])
        total[self.first : self.first + len(columns)] += columns
        return total

    def expand(self, weights: Tensor) -> Tensor:
        """Give every row the weight of its group: ``[r] -> [rows]``."""
        return self.groups.expand(weights[self.first : self.first + self.groups.rank])


class Samples:
    """The rows of the forward passes of a step, one pass after another, in ``rank`` groups.

    Args:
        rank: how many groups, or ``"full"``.
        rows: of each pass in this process.
        planned: how many rows each process is going to have, where that had to be guessed. Groups that get none are
            left out, and more rows than planned go on into the groups that follow, at last into the last one.
        place: which of the processes this one is: its rows come after those of the processes before.
        everywhere: how many rows each group has in all processes, from how many it has in this one.
    """

    def __init__(
        self,
        rank: int | str = 1,
        rows: Mapping[Any, int] | None = None,
        planned: Sequence[int] | None = None,
        place: int = 0,
        everywhere: Callable[[list[int]], list[int]] = list,
    ) -> None:
        rows = rows or {}
        planned = [sum(rows.values())] if planned is None else planned
        whole, start = Groups.of(sum(planned), rank), sum(planned[:place])
        width = whole.rank if rank == "full" else int(rank)  # the same everywhere, whatever each process has planned
        cuts = {each: _overlap(whole, start + a, start + b, width) for each, (a, b) in _places(rows).items()}
        sizes = everywhere([sum(cut[g] for cut in cuts.values()) for g in range(width)])
        kept = [g for g, n in enumerate(sizes) if n] or [0]
        self.groups = Groups.of_sizes([sizes[g] for g in kept])
        self._parts = {each: self._part([cut[g] for g in kept]) for each, cut in cuts.items()}

    def _part(self, cut: list[int]) -> Part:
        inside = [g for g, n in enumerate(cut) if n] or [0]
        return Part(Groups.of_sizes([cut[g] for g in inside]), inside[0], self.groups.rank)

    @property
    def first(self) -> int:
        """The first group of this process."""
        return min((part.first for part in self._parts.values() if part.groups.batch), default=0)

    def of(self, each: Any) -> Part:
        """The rows of one pass."""
        everything = Part(Groups(1, 1), 0, 1)
        return self._parts.get(each, everything) if self.groups.rank == 1 else self._parts[each]


def _places(rows: Mapping[Any, int]) -> dict[Any, tuple[int, int]]:
    """Where each begins and ends."""
    return dict(zip(rows, pairwise(accumulate(rows.values(), initial=0)), strict=True))


def _overlap(groups: Groups, start: int, end: int, width: int) -> list[int]:
    """How many of some rows are in each group, of ``width``; those beyond the end are in the last that there is."""
    starts = [*groups.starts[:-1], max(end, groups.batch)]
    return [max(min(end, b) - max(start, a), 0) for a, b in pairwise(starts)] + [0] * (width - groups.rank)

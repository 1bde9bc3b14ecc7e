"""Groups of samples: the columns of D_k and G_k.

A mini-batch of B samples is split into r contiguous groups; sample i is in group floor(i·r/B). The number of
groups is the *rank* of the Gauss-Newton term: r = 1 is the paper's Prop. 3, r = B is no approximation at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """``rank`` contiguous groups of ``batch`` rows (r > B means B)."""

    batch: int
    rank: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", max(1, min(self.rank, self.batch)))

    @cached_property
    def sizes(self) -> list[int]:
        """n_g, the number of rows of each group; they differ by one at most."""
        starts = self._starts
        return [b - a for a, b in pairwise(starts)]

    @cached_property
    def _starts(self) -> list[int]:
        # floor(i r / B) = g  <=>  ceil(g B / r) <= i < ceil((g+1) B / r)
        return [-(-g * self.batch // self.rank) for g in range(self.rank + 1)]

    @property
    def even(self) -> bool:
        return self.batch % self.rank == 0

    def of_rows(self, device: torch.device | str | None = None) -> Tensor:
        """The group of each row, ``[B]``."""
        return torch.arange(self.batch, device=device) * self.rank // max(self.batch, 1)

    def fractions(self, like: Tensor) -> Tensor:
        """ν = n / B, ``[r]``, in the dtype and on the device of ``like``."""
        if self.even:  # no host data to copy, so no synchronisation on a GPU
            return torch.full((self.rank,), 1.0 / self.rank, dtype=like.dtype, device=like.device)
        rows = self.of_rows(like.device)
        ones = torch.full((self.batch,), 1.0 / self.batch, dtype=like.dtype, device=like.device)
        return torch.zeros(self.rank, dtype=like.dtype, device=like.device).index_add_(0, rows, ones)

    def fit(self, t: Tensor) -> bool:
        """Can a tensor be split into groups, as far as its shape tells? (One group is everything.)"""
        return self.rank == 1 or t.shape[:1] == (self.batch,)

    def sum(self, rows: Tensor) -> Tensor:
        """Add up the rows of each group: ``[B, ...] -> [r, ...]``."""
        if self.even:
            return rows.reshape(self.rank, self.batch // self.rank, *rows.shape[1:]).sum(1)
        out = rows.new_zeros(self.rank, *rows.shape[1:])
        return out.index_add_(0, self.of_rows(rows.device), rows)

    def split(self, rows: Tensor) -> Tensor:
        """One slab of rows per group: ``[B, ...] -> [r, max n, ...]``, short groups filled up with zeros."""
        if self.even:
            return rows.reshape(self.rank, self.batch // self.rank, *rows.shape[1:])
        longest = -(-self.batch // self.rank)
        group = self.of_rows(rows.device)
        start = -(-(group * self.batch) // self.rank)
        place = group * longest + torch.arange(self.batch, device=rows.device) - start
        out = rows.new_zeros(self.rank * longest, *rows.shape[1:]).index_copy_(0, place, rows)
        return out.reshape(self.rank, longest, *rows.shape[1:])

    def expand(self, weights: Tensor) -> Tensor:
        """Give every row the weight of its group: ``[r] -> [B]``."""
        return weights[self.of_rows(weights.device)]

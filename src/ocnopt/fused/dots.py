"""⟨x, y⟩ in one kernel, where torch takes two, and more for what is taken off and added; many of them in two."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ocnopt import whole_step
from ocnopt.fused import support
from ocnopt.fused.tables import Addresses
from ocnopt.groups import Groups

#: up to so many work on one sum, or on as many as there are rows
_PROGRAMS = 512

#: how many lists of sizes are remembered
_PLANS = 64


class _Arrivals:
    """How many of the programs of a sum have come, zero between two sums. Kernels of one stream take turns."""

    def __init__(self) -> None:
        self._of_stream: dict[tuple[torch.device, int], Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        if device.type != "cuda" or whole_step.capturing():
            return whole_step.once((_Arrivals, device), lambda: self._new(device))
        key = device, torch.cuda.current_stream(device).cuda_stream
        if key not in self._of_stream:
            self._of_stream[key] = self._new(device)
        return self._of_stream[key]

    @staticmethod
    def _new(device: torch.device) -> Tensor:
        return torch.zeros((), dtype=torch.int32, device=device)


_arrivals = _Arrivals()


def dot(x: Tensor, y: Tensor, less: Tensor | None = None) -> Tensor | None:
    """⟨x, y⟩ of two vectors, less a number, in float32; ``None`` where that cannot be had."""
    if not _there_is_one(x, y):
        return None
    found = _sums(x.contiguous(), y.contiguous(), less)  # a column, or a number that was expanded
    return None if found is None else found[0, 0]


def changes(
    x: Tensor,
    y: Tensor,
    before: Tensor,
    groups: Groups | None,
    scale: Tensor | None = None,
    sign: float = 1.0,
    plus: Tensor | None = None,
) -> Tensor | None:
    """``[2, r]``: ⟨x, y⟩ less what it was before, scaled, and that and ``plus``; ``None`` where that cannot be had.

    Args:
        groups: of rows, of each of which ``before`` tells; ``None``: all numbers are one.
    """
    if not _there_is_one(x, y) or not in_same_order(x, y) or before.dtype != torch.float32:
        return None
    if groups is not None and not support.splits_on(x.device, groups.rank):
        return None
    if any(t is not None and t.device != x.device for t in (scale, plus)):
        return None
    return _sums(x, y, before, groups, scale, sign, plus)


def _sums(
    x: Tensor,
    y: Tensor,
    less: Tensor | None,
    groups: Groups | None = None,
    scale: Tensor | None = None,
    sign: float = 1.0,
    plus: Tensor | None = None,
) -> Tensor | None:
    kernels, (rows, rank) = support.kernels(), (1, 1) if groups is None else (groups.batch, groups.rank)
    width = x.numel() // max(rows, 1)
    parts = _programs(width, kernels.BLOCK, max(_PROGRAMS // max(rows, 1), 1))
    partials, result = (x.new_empty(size, dtype=torch.float32) for size in (rows * parts, (2, rank)))
    of_rows = None if groups is None else groups.of_rows(x.device)
    given = [partials if t is None else t for t in (less, of_rows, scale, plus)]
    how = {"LESS": less is not None, "SCALED": scale is not None, "SIGN": sign, "PLUS": plus is not None, "RANK": rank}
    try:
        kernels.change[rows * parts,](
            x,
            y,
            *given,
            partials,
            _arrivals.on(x.device),
            result,
            width,
            parts,
            **how,
            WIDE=support.room_for(rank),
            BLOCK=kernels.BLOCK,
        )
    except Exception as error:
        support.breaks(error)
        return None
    return result


def _programs(numbers: int, block: int, most: int = _PROGRAMS) -> int:
    """That work on a sum of so many."""
    return min(max(-(-numbers // block), 1), most)


class Pair(NamedTuple):
    """Two tensors with their numbers in the same order, without gaps."""

    x: Tensor
    y: Tensor
    rows: int  # how many products are wanted, along dimension 0; 0: one, of all numbers


def can_wait(x: Tensor, y: Tensor) -> bool:
    """Is there a kernel for their product, with others?"""
    return _there_is_one(x, y)


def _there_is_one(x: Tensor, y: Tensor) -> bool:
    kinds = x.dtype in support.KINDS and y.dtype in support.KINDS
    return kinds and x.get_device() == y.get_device() and support.why_not_on(x.device) is None


def in_same_order(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape or not x.numel():
        return False
    if x.is_contiguous() and y.is_contiguous():
        return True
    last = torch.channels_last
    return x.dim() == 4 and x.is_contiguous(memory_format=last) and y.is_contiguous(memory_format=last)


def places(pairs: Sequence[Pair]) -> list[int]:
    """Where the products of each begin among those of all."""
    return [*accumulate([pair.rows or 1 for pair in pairs[:-1]], initial=0)]


def dots(pairs: Sequence[Pair]) -> Tensor | None:
    """⟨x, y⟩ of each, one after the other, in float32; all on one device and of the same dtypes. ``None`` where that
    cannot be had.
    """
    kernels, (x, y, _) = support.kernels(), pairs[0]
    plan = _plans.of(x.device, tuple([(pair.x.numel(), pair.rows) for pair in pairs]), kernels.BLOCK)
    row = [pair.x.data_ptr() for pair in pairs] + [pair.y.data_ptr() for pair in pairs]
    addresses = None if plan is None else plan.addresses.of(row)
    if plan is None or addresses is None:
        return None
    whole_step.keep(plan)
    partials = torch.empty(len(plan.shares), dtype=torch.float32, device=x.device)
    results = torch.empty(plan.products, dtype=torch.float32, device=x.device)
    how = {"X": kernels.KINDS[x.dtype], "Y": kernels.KINDS[y.dtype], "BLOCK": kernels.BLOCK}
    try:
        kernels.dots[len(partials),](addresses, plan.shares, partials, len(pairs), **how)
        kernels.sums[plan.products,](partials, plan.firsts, results, BLOCK=kernels.BLOCK)
    except Exception as error:
        support.breaks(error)
        return None
    return results


#: of each pair, how many numbers there are, in how many rows
Sizes = tuple[tuple[int, int], ...]


class _Plan:
    """Who adds up what, for pairs of these sizes."""

    def __init__(self, device: torch.device, sizes: Sizes, block: int) -> None:
        shares, counts = [], []
        for which, (numbers, rows) in enumerate(sizes):
            width = numbers // max(rows, 1)
            programs = _programs(width, block)
            starts, firsts = torch.meshgrid(torch.arange(rows or 1) * width, torch.arange(programs), indexing="ij")
            fixed = [torch.full_like(starts, number) for number in (which, programs, width)]
            shares.append(torch.stack([fixed[0], starts, firsts, *fixed[1:]], -1).reshape(-1, 5))
            counts += [programs] * (rows or 1)
        self.products = len(counts)
        self.shares = torch.cat(shares).to(device, non_blocking=True)  # see the kernel
        self.firsts = torch.tensor([*accumulate(counts, initial=0)]).to(device, non_blocking=True)
        self.addresses = Addresses(device)


class _Plans:
    """The last ones. Kernels of one stream take turns: each has its own."""

    def __init__(self) -> None:
        self._known: dict[tuple[Sizes, torch.device, int], _Plan] = {}

    def of(self, device: torch.device, sizes: Sizes, block: int) -> _Plan | None:
        if device.type == "cuda" and whole_step.capturing():  # a graph can make none
            known = (plan for key, plan in self._known.items() if key[:2] == (sizes, device))
            return next((plan for plan in known if plan.addresses.has_room), None)
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = sizes, device, stream
        self._known[key] = plan = self._known.pop(key, None) or _Plan(device, sizes, block)
        if len(self._known) > _PLANS:
            del self._known[next(iter(self._known))]
        return plan


_plans = _Plans()

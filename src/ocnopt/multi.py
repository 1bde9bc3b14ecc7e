"""Multi-tensor helpers: one call for the tensors of many layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}

_LARGEST = {torch.float32: 1e15, torch.float64: 1e150}

_ROW = 1024


def inner(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """``[n]``: the inner product of each pair."""
    if xs[0].is_cuda:
        return sums(torch._foreach_mul(list(xs), list(ys)))
    return torch.stack([torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(xs, ys, strict=True)])


def sums(tensors: Sequence[Tensor]) -> Tensor:
    """``[n]``: the sum of each, in few launches, which cost more than memory does.

    They are laid out in rows, and what is left of the last row of each is zero: all rows are summed side by side, and
    the few sums that are then a tensor's own one after another.
    """
    zeros, rows = _layout(tuple(t.numel() for t in tensors), tensors[0].dtype, tensors[0].device)
    parts = (part for t in tensors for part in (t.reshape(-1), zeros[: -t.numel() % _ROW]))
    return torch.segment_reduce(torch.cat(list(parts)).view(-1, _ROW).sum(1), "sum", lengths=rows, unsafe=True)


@lru_cache(maxsize=64)
def _layout(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Zeros to fill up rows with, and how many rows each tensor takes."""
    return torch.zeros(_ROW, dtype=dtype, device=device), torch.tensor([-(-n // _ROW) for n in numbers], device=device)


def finite(tensors: Sequence[Tensor]) -> Tensor:
    """``[n]`` booleans on the device of the first: can every entry of each tensor be squared and summed?

    NaN and infinity cannot, nor can numbers whose squares overflow: they would stay in second moments and factors.
    """
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        if t.numel():
            places.setdefault((t.device, t.dtype), []).append(i)
    fine = [torch.ones((), dtype=torch.bool, device=tensors[0].device)] * len(tensors)
    for (_, dtype), chosen in places.items():
        largest = torch.stack(torch._foreach_norm([tensors[i] for i in chosen], torch.inf))
        wide = torch.promote_types(dtype, torch.float32)
        bounded = largest.to(wide) < _LARGEST[wide]
        for i, each in zip(chosen, bounded.to(fine[0].device).unbind(), strict=True):
            fine[i] = each
    return torch.stack(fine)


def sums_finite(tensors: Sequence[Tensor]) -> Tensor:
    """``[n]`` booleans on the device of the first: is the sum of each finite? The cheapest look at large tensors."""
    sums = [t.float().sum() if t.itemsize < 4 else t.sum() for t in tensors]
    return torch.stack([torch.isfinite(s).to(tensors[0].device) for s in sums])


def masked(tensors: Sequence[Tensor], ok: Tensor) -> list[Tensor]:
    """Copies that are all zero where ``ok`` (0 or 1) is 0, whatever was in them.

    The product is taken on the bits: NaN · 0 is NaN, but an integer times zero is zero.
    """
    bits = _BITS[tensors[0].dtype]
    keep = ok.to(bits)
    return [t.view(tensors[0].dtype) for t in torch._foreach_mul([t.contiguous().view(bits) for t in tensors], keep)]


def ema_(averages: list[Tensor], values: list[Tensor], weight: Tensor) -> None:
    """average ← (1 − weight) · average + weight · value; overwrites ``values``."""
    torch._foreach_mul_(values, weight)
    torch._foreach_mul_(averages, 1 - weight)
    torch._foreach_add_(averages, values)

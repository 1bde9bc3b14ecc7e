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


def inner(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """``[n]``: the inner product of each pair."""
    if not xs[0].is_cuda:
        return torch.stack([torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(xs, ys, strict=True)])
    # launches cost more than memory here: one sum over segments in place of one reduction a tensor
    products = torch.cat([p.reshape(-1) for p in torch._foreach_mul(list(xs), list(ys))])
    lengths = _lengths(tuple(x.numel() for x in xs), xs[0].device)
    return torch.segment_reduce(products, "sum", lengths=lengths, unsafe=True)


@lru_cache(maxsize=64)
def _lengths(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


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

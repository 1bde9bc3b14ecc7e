"""Multi-tensor helpers: one call for the tensors of many layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def inner(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """``[n]``: the inner product of each pair."""
    return torch.stack([torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(xs, ys, strict=True)])


def finite(tensors: Sequence[Tensor]) -> Tensor:
    """``[n]`` booleans on the device: is every entry of each tensor finite? An empty tensor is."""
    filled = [t for t in tensors if t.numel()]
    norms = iter(torch._foreach_norm(filled, torch.inf) if filled else ())
    one = torch.ones((), device=tensors[0].device)
    return torch.stack([torch.isfinite(next(norms)) if t.numel() else one.bool() for t in tensors])


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

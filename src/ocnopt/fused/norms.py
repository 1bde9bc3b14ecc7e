"""All gradients of a batch norm in one kernel, those of groups of samples among them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ocnopt.fused import support
from ocnopt.fused.sums import is_differentiated, starts_of
from ocnopt.groups import Groups

#: numbers that a program has at a time
_TILE = 4096


class Gradients(NamedTuple):
    into: Tensor  # ∂L/∂x
    columns: Tensor  # [2, r, C], of weight and bias
    weight: Tensor  # their sums
    bias: Tensor


def fit(rank: int, *tensors: Tensor) -> bool:
    """Is there a kernel for them, and for so many groups?"""
    plain = all(t.dtype == torch.float32 and t.is_contiguous() and t.numel() for t in tensors)
    return plain and support.splits_on(tensors[0].device, rank)


def backward(x: Tensor, h: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, groups: Groups) -> Gradients | None:
    """Of a batch norm of ``[B, C, *positions]`` by the statistics of the batch: ``mean``, and ``scale`` = 1/σ. ``None``
    where that cannot be had.
    """
    given = x, h, mean, scale, weight
    if not fit(groups.rank, *given) or any(map(is_differentiated, given)):
        return None
    channels, positions = x.shape[1], x[0, 0].numel()
    sums = torch.empty_like(weight), torch.empty_like(weight)
    found = Gradients(torch.empty_like(x), x.new_empty(2, groups.rank, channels), *sums)
    wide, block = support.room_for(groups.rank), min(support.room_for(positions), 64)
    together = max(1, 32 // block)
    rows = min(support.room_for(max(groups.sizes)), _TILE // (wide * together * block))
    try:
        support.kernels().norm_backward[-(-channels // together),](
            *given,
            starts_of(groups, x.device),
            *found,
            channels,
            positions,
            len(x) * positions,
            RANK=groups.rank,
            WIDE=wide,
            ROWS=rows,
            CHANNELS=together,
            BLOCK=block,
            num_warps=max(4, wide * rows * together * block // 512),
        )
    except Exception as error:
        support.breaks(error)
        return None
    return found

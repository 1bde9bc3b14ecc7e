"""Sums over samples and groups of them: in one kernel where torch takes four, or at twice the speed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ocnopt import whole_step
from ocnopt.fused import support
from ocnopt.groups import Groups


def by_channel(x: Tensor, h: Tensor, groups: Groups) -> tuple[Tensor, Tensor] | None:
    """Σ h ⊙ x and Σ h over samples and positions of tensors ``[B, C, *positions]``: ``[r, C]``; ``None`` where that
    cannot be had.
    """
    if x.shape != h.shape or not h.numel() or x.dtype != torch.float32 or h.dtype != torch.float32:
        return None
    if is_differentiated(x) or is_differentiated(h):
        return None
    if support.why_not_on(h.device) is not None or not (x.is_contiguous() and h.is_contiguous()):
        return None
    channels, kernels = h.shape[1], support.kernels()
    found = h.new_empty(2, groups.rank, channels)
    positions = h.numel() // (len(h) * channels)
    block = min(support.room_for(positions), 64)
    starts = starts_of(groups, h.device)
    try:
        kernels.by_channel[channels, groups.rank](x, h, starts, found, positions, ROWS=1024 // block, BLOCK=block)
    except Exception as error:
        support.breaks(error)
        return None
    return found[0], found[1]


def total(G: Tensor) -> Tensor:
    """Of group gradients ``[r, *shape]``, the gradient."""
    numbers = G[0].numel()
    known = G.dtype == torch.float32 and G.is_contiguous() and numbers
    if not known or is_differentiated(G) or not support.splits_on(G.device, len(G)):
        return G.sum(0)
    kernels, found = support.kernels(), torch.empty_like(G[0])
    aligned = not any(n % 4 for n in (numbers, G.data_ptr() // 4))
    grid = (-(-numbers // kernels.BLOCK),)
    try:
        kernels.total[grid](G, found, numbers, ALIGNED=aligned, RANK=len(G), BLOCK=kernels.BLOCK)
    except Exception as error:
        support.breaks(error)
        return G.sum(0)
    return found


def is_differentiated(t: Tensor) -> bool:
    return (t.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0


def starts_of(groups: Groups, device: torch.device) -> Tensor:
    """The first row of each group, and the end, on the device."""
    return _starts(tuple(groups.starts), device)


@whole_step.remembered
def _starts(starts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(starts).to(device, non_blocking=True)

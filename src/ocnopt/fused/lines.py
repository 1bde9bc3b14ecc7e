"""The lines of all stages in one kernel, where torch takes dozens: see :class:`ocnopt.bellman.Consistent`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ocnopt import whole_step
from ocnopt.fused import support


class Part(Protocol):
    """That of :mod:`ocnopt.problem`."""

    seats: list[int]
    K: Tensor
    u: Tensor | None
    free: Tensor | None
    of_K: float
    of_u: float
    scale: float | Tensor


def lines(part: Part, stage_of: Sequence[int], precision: Tensor) -> tuple[Tensor, Tensor] | None:
    """J^{-1} b, ``[S, r]``, and J^{-1}, ``[S, r, r]``; ``None`` where that cannot be had."""
    rank, K, lr = len(precision), part.K, part.scale
    costs = [t for t in (part.u, part.free) if t is not None]
    if not support.splits_on(K.device, rank) or any(t.dtype != torch.float32 for t in (K, *costs, precision)):
        return None
    laid_out = K.stride()[1:] == (rank, 1) and all(t.stride() == (K.stride(0), 1) for t in costs)
    if not laid_out or (isinstance(lr, Tensor) and lr.device != K.device):
        return None
    count = max(stage_of) + 1
    starts, slopes = precision.new_empty(count, rank), precision.new_empty(count, rank, rank)
    stages = _stages(tuple(stage_of[seat] for seat in part.seats), K.device)
    try:
        support.kernels().lines[count,](
            K,
            K if part.u is None else part.u,
            K if part.free is None else part.free,
            stages,
            precision,
            lr,
            starts,
            slopes,
            len(K),
            K.stride(0),
            float(part.of_K),
            float(part.of_u),
            COST=part.u is not None,
            FREE=part.free is not None,
            RATE_ON_DEVICE=isinstance(lr, Tensor),
            RANK=rank,
            WIDE=support.room_for(rank),
            BLOCK=32,
            num_warps=1 if rank == 1 else 4,
        )
    except Exception as error:
        support.breaks(error)
        return None
    return starts, slopes


@whole_step.remembered
def _stages(stages: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(stages).to(device, non_blocking=True)

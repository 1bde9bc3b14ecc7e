"""The time interval of a block: its validation and its division into segments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Times = Sequence[float] | Tensor


def checked(t: Times) -> tuple[float, ...]:
    """At least two finite times, strictly increasing or strictly decreasing."""
    if isinstance(t, Tensor) and t.requires_grad:
        raise ValueError("t must not require a gradient: pass learn_horizon=Horizon(...) to learn the final time")
    try:
        times = tuple(float(v) for v in t)
    except (TypeError, ValueError) as error:
        raise ValueError(f"t must be a sequence of numbers, got {t!r}") from error
    signs = {b > a for a, b in pairwise(times)}
    if len(times) < 2 or len(signs) != 1 or len(set(times)) != len(times) or not all(map(math.isfinite, times)):
        raise ValueError(
            f"t must be at least two finite times, strictly increasing or strictly decreasing, got {times}"
        )
    return times


def on_device(times: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(times, dtype=like.dtype, device=like.device)


def segments(times: tuple[float, ...], count: int, step_size: float | None, adaptive: bool) -> list[tuple[float, ...]]:
    """The times in ``count`` pieces, each beginning where the one before ended, with borders between them.

    Borders never add a step to a fixed grid: they are grid points where ``step_size`` makes one, and else (the times
    themselves are the grid) some of the times.
    """
    t0, T = times[0], times[-1]
    if adaptive:
        borders = [t0 + (T - t0) * k / count for k in range(count + 1)]
    elif step_size is not None:
        steps = math.ceil(abs(T - t0) / step_size)
        chosen = sorted({round(steps * k / count) for k in range(count)})
        borders = [t0 + math.copysign(step_size * k, T - t0) for k in chosen] + [T]
    else:
        last = len(times) - 1
        borders = [times[k] for k in sorted({round(last * k / count) for k in range(count + 1)})]
    borders[-1] = T
    return [(a, *(t for t in times if min(a, b) < t < max(a, b)), b) for a, b in pairwise(borders)]


def why_not_checkpointed(
    times: tuple[float, ...], count: int, options: Mapping[str, Any] | None, adaptive: bool
) -> str | None:
    """Why a solve cannot be cut into so many pieces, or ``None``."""
    options = options or {}
    if adaptive:
        return None
    if "grid_constructor" in options:
        return "checkpoints cannot be combined with a grid_constructor: give step_size instead"
    if "step_size" in options:
        return None
    if len(times) - 1 < count:
        return (
            f"checkpoints={count} needs at least as many steps, and without options={{'step_size': ...}} a solver with "
            f"a fixed grid takes one between two times: {len(times) - 1} in all"
        )
    return None

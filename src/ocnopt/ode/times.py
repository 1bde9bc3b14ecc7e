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


def why_not_apart(times: Sequence[float], dtype: torch.dtype) -> str | None:
    """Why times that differ are the same in the dtype of the state, in which torchdiffeq takes them, or ``None``."""
    rounded = torch.tensor(times, dtype=dtype, device="cpu").tolist()
    for (a, b), (first, second) in zip(pairwise(times), pairwise(rounded), strict=True):
        if first == second:
            what = f"{a} and {b} are the same time in {dtype}, the dtype of the state"
            return f"t: {what}: begin nearer to 0, or solve in float64"
    return None


def segments(times: Tensor, count: int, step_size: float | None, adaptive: bool) -> list[Tensor]:
    """The times in at most ``count`` pieces, each beginning where the one before ended, with borders between them.

    Borders never add a step to a fixed grid: they are grid points where ``step_size`` makes one, and else (the times
    themselves are the grid) some of the times.
    """
    at = times.tolist()
    wanted = times.new_tensor(_borders(times, count, step_size, adaptive)).tolist()
    borders = list(dict.fromkeys(wanted))  # which may coincide in the dtype of the times
    pieces = [(a, *(t for t in at if min(a, b) < t < max(a, b)), b) for a, b in pairwise(borders)]
    return [times.new_tensor(piece) for piece in pieces]


def _borders(times: Tensor, count: int, step_size: float | None, adaptive: bool) -> list[float]:
    at = times.tolist()
    t0, T = at[0], at[-1]
    if adaptive:
        return [*(t0 + (T - t0) * k / count for k in range(count)), T]
    if step_size is not None:
        steps = int(((times[-1] - times[0]).abs() / step_size + 1).ceil()) - 1  # rounded as torchdiffeq does
        count = min(count, steps)
        return [*(t0 + math.copysign(step_size * round(steps * k / count), T - t0) for k in range(count)), T]
    return [at[round((len(at) - 1) * k / count)] for k in range(count + 1)]


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

"""Multi-tensor helpers: one call for the tensors of many layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ocnopt import whole_step

_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}

#: sums of squares
_LARGEST = {torch.float32: 1e30, torch.float64: 1e300}

_ROW = 1024

#: so many numbers are little beside what a network takes that has more parameters than that
_CHUNK = 2**23


def inner(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """``[n]``: the inner product of each pair."""
    if xs[0].is_cuda:
        return _few_launches(xs, ys, _CHUNK)
    return torch.stack([torch.dot(x.reshape(-1), y.reshape(-1)) for x, y in zip(xs, ys, strict=True)])


def _few_launches(xs: Sequence[Tensor], ys: Sequence[Tensor], chunk: int) -> Tensor:
    """As :func:`inner`. Products are written down, of so many numbers at a time."""
    found = []
    for start, end in _chunks([x.numel() for x in xs], chunk):
        if end == start + 1:
            found.append(torch.dot(xs[start].reshape(-1), ys[start].reshape(-1)).reshape(1))
        else:
            found.append(sums(torch._foreach_mul(list(xs[start:end]), list(ys[start:end]))))
    return found[0] if len(found) == 1 else torch.cat(found)


def _chunks(numbers: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Neighbours that have no more than ``limit`` numbers together, or are one."""
    ends, held = [0], 0
    for i, n in enumerate(numbers):
        if held + n > limit and i > ends[-1]:
            ends.append(i)
            held = 0
        held += n
    return list(pairwise([*ends, len(numbers)]))


def sums(tensors: Sequence[Tensor]) -> Tensor:
    """``[n]``: the sum of each, in few launches, which cost more than memory does.

    They are laid out in rows, and what is left of the last row of each is zero: all rows are summed side by side, and
    the few sums that are then a tensor's own one after another.
    """
    zeros, ends = _layout(tuple(t.numel() for t in tensors), tensors[0].dtype, tensors[0].device)
    parts = (part for t in tensors for part in (t.reshape(-1), zeros[: -t.numel() % _ROW]))
    return torch.segment_reduce(torch.cat(list(parts)).view(-1, _ROW).sum(1), "sum", offsets=ends, unsafe=True)


@whole_step.remembered
def _layout(numbers: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Zeros to fill up rows with, and where the rows of each tensor begin and end."""
    ends = list(accumulate((-(-n // _ROW) for n in numbers), initial=0))
    return torch.zeros(_ROW, dtype=dtype, device=device), torch.tensor(ends, device=device)


def squares(tensors: Sequence[Tensor]) -> Tensor:
    """``[n]``: the sum of the squares of each, in float32 at least."""
    if tensors[0].is_cuda:
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype)).square()
    flat = [_wide(t.reshape(-1)) for t in tensors]
    return torch.stack([torch.dot(t, t) for t in flat])


def moderate(squares: Tensor) -> Tensor:
    """Can entries of which these are the sums of squares be squared and summed?

    NaN and infinity cannot, nor can numbers whose squares overflow: they would stay in second moments and factors.
    """
    return squares < _LARGEST[squares.dtype]


def finite(tensors: Sequence[Tensor]) -> Tensor:
    """``[n]`` booleans on the device of the first: can every entry of each tensor be squared and summed?"""
    return _all_fine(tensors, lambda alike: moderate(squares(alike)))


def sums_finite(tensors: Sequence[Tensor]) -> Tensor:
    """``[n]`` booleans on the device of the first: is the sum of each finite? The cheapest look at large tensors."""
    return _all_fine(
        tensors, lambda alike: (sums := _quick_sums(alike)).sub(sums) == 0
    )  # in fewer launches than isfinite


def _quick_sums(tensors: list[Tensor]) -> Tensor:
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    if all(t.dim() == 0 for t in tensors):
        return torch.stack(tensors).to(wide)
    if tensors[0].is_cuda:  # of the absolute values, but for all of them at once
        return torch.stack(torch._foreach_norm(tensors, 1, dtype=wide))
    return torch.stack([t.sum(dtype=wide) for t in tensors])


def _all_fine(tensors: Sequence[Tensor], look: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """``look`` tells of some tensors that are alike."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        alike.setdefault((t.device, t.dtype), []).append(i)
    fine = [look([tensors[i] for i in chosen]) for chosen in alike.values()]
    if len(fine) == 1:
        return fine[0]
    device = tensors[0].device
    single = {
        i: each
        for chosen, found in zip(alike.values(), fine, strict=True)
        for i, each in zip(chosen, found.to(device).unbind(), strict=True)
    }
    return torch.stack([single[i] for i in range(len(tensors))])


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype in _LARGEST else t.to(torch.float32)


def masked(tensors: Sequence[Tensor], ok: Tensor) -> list[Tensor]:
    """Copies that are all zero where ``ok`` (0 or 1) is 0, whatever was in them.

    The product is taken on the bits: NaN · 0 is NaN, but an integer times zero is zero.
    """
    bits = _BITS[tensors[0].dtype]
    products = torch._foreach_mul([t.contiguous().view(bits) for t in tensors], ok.to(bits))
    return [t.view(tensors[0].dtype) for t in products]


def mask_(tensors: Sequence[Tensor], ok: Tensor) -> None:
    """The same in place."""
    bits = _BITS[tensors[0].dtype]
    torch._foreach_mul_([t.view(bits) for t in tensors], ok.to(bits))


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies, in a few launches where tensors are alike."""
    copies = [torch.empty_like(t) for t in tensors]
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for copy, t in zip(copies, tensors, strict=True):
        ours, theirs = alike.setdefault((t.device, t.dtype), ([], []))
        ours.append(copy)
        theirs.append(t)
    for ours, theirs in alike.values():
        torch._foreach_copy_(ours, theirs)
    return copies

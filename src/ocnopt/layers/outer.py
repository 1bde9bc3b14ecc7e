"""Sums of outer products h x^T: the gradients of every layer that multiplies its input by a matrix.

All functions take ``x``: ``[batch, blocks, shared, a]`` and ``h``: ``[batch, blocks, shared, c]``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ocnopt.fused.native import binding as native
from ocnopt.groups import Groups
from ocnopt.layers.base import Call, compute_dtype

# Temporaries are made in pieces of at most this many numbers (64 MiB in float32).
PIECE = 2**24

# What passes through them once, on a CPU: it fits into a cache (4 MiB in float32).
CACHED = 2**20

# An element of an explicit gradient is written and read a few times, which takes as long as this many of the
# multiplications of a matrix product (measured on a CPU core: whole steps, Linear, width 64 to 1024, r = 2 to 64); and
# where kernels do that (two cores, width 64 to 2048, batch 32 to 512, r = 2 and 8).
TRAFFIC, BY_KERNELS = 48, 30


def operands(call: Call) -> tuple[Tensor, Tensor]:
    """Input and output adjoint of a call, both in the dtype to compute in."""
    dtype = compute_dtype(torch.promote_types(call.x.dtype, call.h.dtype))
    return call.x.to(dtype), call.h.to(dtype)


def traffic(t: Tensor) -> int:
    """What an element costs of gradients that are split as this adjoint is."""
    return BY_KERNELS if t.device.type == "cpu" and native.why_not(t.dtype) is None else TRAFFIC


def piece_of(device: torch.device) -> int:
    """How many numbers to form at a time where they are used at once. Elsewhere each piece is some more launches."""
    return CACHED if device.type == "cpu" else PIECE


def pieces(total: int, size: int) -> Iterator[slice]:
    """Slices that cover ``range(total)``, each of as many items of ``size`` numbers as fit into a piece."""
    step = max(1, PIECE // max(1, size))
    return (slice(start, start + step) for start in range(0, total, step))


def group_sums(x: Tensor, h: Tensor, groups: Groups) -> Tensor:
    """Σ h x^T over the samples of each group and the shared positions, ``[r, blocks, c, a]``."""
    return torch.einsum("gnbtc,gnbta->gbca", groups.split(h), groups.split(x))


def gram(x: Tensor, h: Tensor) -> Tensor:
    """``[B, B]``: inner products of the samples' Σ_t h x^T, by the cheaper of the two ways."""
    batch, blocks, shared, a = x.shape
    c = h.shape[-1]
    by_pairs = blocks * (batch * shared) ** 2 * (a + c)
    by_gradients = blocks * a * c * batch * (batch + shared)
    return _gram_by_pairs(x, h) if by_pairs <= by_gradients else _gram_by_gradients(x, h)


def _gram_by_pairs(x: Tensor, h: Tensor) -> Tensor:
    """K_ij = Σ_{t,t'} (x_it·x_jt')(h_it·h_jt'): no gradient is formed."""
    batch, blocks, shared, _ = x.shape
    x, h = (v.transpose(0, 1).flatten(1, 2) for v in (x, h))
    rows, parts = [], [1 if v.device.type == "cpu" else parts_of(v.shape[-1]) for v in (x, h)]
    for samples in pieces(batch, blocks * batch * shared**2):
        part = slice(samples.start * shared, samples.stop * shared)
        pairs = products(x[:, part], x, parts[0]) * products(h[:, part], h, parts[1])
        if blocks == shared == 1:
            rows.append(pairs[0])
        else:
            count = len(range(batch)[samples])
            rows.append(pairs.reshape(blocks, count, shared, batch, shared).sum((0, 2, 4)))
    return rows[0] if len(rows) == 1 else torch.cat([x.new_zeros(0, batch), *rows])


def products(x: Tensor, y: Tensor, parts: int) -> Tensor:
    """x y^T of ``[blocks, n, a]`` and ``[blocks, m, a]``. Where a is long, few numbers come out, and a GPU has
    nothing to do side by side but parts of the same sums.
    """
    if parts == 1:
        return x @ y.mT
    x, y = (v.unflatten(-1, (parts, -1)).transpose(1, 2) for v in (x, y))
    return (x @ y.mT).sum(1)


def parts_of(length: int) -> int:
    """Into how many equal parts to cut a sum of so many products: at most 32, of 128 or more."""
    return next(n for n in range(min(32, max(1, length // 128)), 0, -1) if length % n == 0)


def _gram_by_gradients(x: Tensor, h: Tensor) -> Tensor:
    """The samples' gradients themselves, some of their rows at a time, when the positions are many."""
    batch, blocks, _, a = x.shape
    K = x.new_zeros(batch, batch)
    for rows in pieces(h.shape[-1], batch * blocks * a):
        g = (h[..., rows].mT @ x).flatten(1)
        K = K.addmm_(g, g.T)
    return K


def pair_cost(batch: int, shared: int, a: int, c: int) -> int:
    """Of :func:`gram` by pairs, in multiplications."""
    return (batch * shared) ** 2 * (a + c)


def gram_is_cheaper(
    batch: int, shared: int, a: int, c: int, rank: int, traffic: int, pairs: float | None = None
) -> bool:
    """Whether the Gram form costs less than the kernel of ``rank`` explicit gradients.

    These cost one weight gradient to form; without them it takes about three to sum the samples, to weight
    them with w and to project on a direction. With one group there is nothing to save: its gradient is ``p.grad``.
    ``pairs``: what the products of pairs of samples cost.
    """
    positions, pairs = batch * shared, pair_cost(batch, shared, a, c) if pairs is None else pairs
    by_gram = pairs + positions * traffic * (a + c) + 2 * positions * a * c
    return rank > 1 and by_gram < a * c * rank * (rank + traffic)

"""What the Kronecker curvature reads of a layer: inputs and adjoints of its samples, and sums over them.

A process that trains with others sees some of the samples only, or none; the sums are what they exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ocnopt.layers.base import Adapter, Call

if TYPE_CHECKING:
    from ocnopt.bucket import Bucket
    from ocnopt.players import Player

#: inputs and adjoints, or gradients of samples, that are formed at a time, in numbers (4 MiB in float32): the windows
#: of a convolution are many times larger than its input
_CHUNK = 1 << 20
#: a window of a convolution is hardly ever larger
_WINDOW = 64


class Inputs:
    """Inputs x and adjoints h, ``[batch, blocks, shared, features]``, of one forward pass, in pieces if need be.

    A module used several times in one pass has more shared positions. Calls in continuous time make ∫x x^T dt and
    ∫h h^T dt: each is weighted by its duration, and all together they are one use, in however many solves.

    ``keep``: what is formed stays until the second look at it, if it is no more than the calls hold anyway.
    """

    def __init__(self, adapter: Adapter, calls: Sequence[Call], ok: Tensor, keep: bool) -> None:
        self.adapter, self.calls, self.ok = adapter, calls, ok
        self.batch, self.positions, self.step = calls[0].batch, 0.0, calls[0].batch
        self._whole: tuple[Tensor, Tensor] | None = None
        held = sum(call.x.numel() + call.h.numel() for call in calls)
        small = held * _WINDOW <= _CHUNK
        like = self._part(0, self.batch if small else 1)  # some samples
        if not small:
            piece = max(_CHUNK, held // len(calls))  # as much as a call holds anyway: no linear layer is cut up
            self.step = max(1, piece // max(1, sum(v.numel() for v in like)))
        if small or (keep and self.step >= self.batch):
            self._whole = like if small else self._part(0, self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._whole is not None:
            yield self._whole
            return
        for i in range(0, self.batch, self.step):
            yield self._part(i, i + self.step)

    def _part(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        uses = [self.adapter.kronecker_inputs(call.rows(start, end)) for call in self.calls]
        self.positions = sum(call.share * use.h.shape[2] for call, use in zip(self.calls, uses, strict=True))
        roots = [math.sqrt(call.duration) for call in self.calls]
        x = torch.cat([_scaled(use.x, root) for use, root in zip(uses, roots, strict=True)], 2)
        h = torch.cat([_scaled(use.h, root) for use, root in zip(uses, roots, strict=True)], 2)
        fine = self.ok > 0
        return torch.where(fine, x, 0).to(self.ok.dtype), torch.where(fine, h, 0).to(self.ok.dtype)


def inputs_of(bucket: Bucket, player: Player, a: Tensor | None) -> list[Inputs]:
    """By forward pass; those without a sample are left out."""
    assert player.adapter is not None
    passes = [(part, calls) for part, calls in bucket.calls[id(player)] if calls[0].batch]
    if a is not None:
        passes = [(part, [call.weighted(part.expand(a)) for call in calls]) for part, calls in passes]
    alone = bucket.world.size == 1  # then one layer is finished before the next
    return [Inputs(player.adapter, calls, bucket.ok, keep=alone) for _, calls in passes]


class Sums(NamedTuple):
    """What one process saw, or all of them: Σ x x^T and Σ h h^T, and over how many samples and positions."""

    A: Tensor
    C: Tensor
    samples: Tensor
    positions: Tensor

    @classmethod
    def over(cls, passes: Sequence[Inputs], like_A: Tensor, like_C: Tensor) -> Sums:
        A, C = torch.zeros_like(like_A), torch.zeros_like(like_C)
        for x, h in (part for p in passes for part in p):
            A, C = A + _outer(x), C + _outer(h)
        samples, positions = sum(p.batch for p in passes), sum(p.batch * p.positions for p in passes)
        return cls(A, C, A.new_full((), samples), A.new_full((), positions))

    def factors(self) -> tuple[Tensor, Tensor]:
        """E[x x^T] and E[h̃ h̃^T], with h̃ = B·h."""
        positions = torch.where(self.positions > 0, self.positions, 1)
        return self.A / self.samples.clamp_min(1), self.C * (self.samples**2 / positions)


def squares_over(passes: Sequence[Inputs], like: Tensor, U_A: Tensor, U_C: Tensor) -> Tensor:
    """Σ_i (U_C^T Σ_t h_it x_it^T U_A)², ``[blocks, c, a]``: squared gradients of samples in the eigenbasis."""
    total = torch.zeros_like(like)
    for x, h in (part for p in passes for part in p):
        total += _squares(x, h, U_A, U_C)
    return total


def _scaled(v: Tensor, factor: float) -> Tensor:
    return v if factor == 1.0 else v * factor


def _outer(v: Tensor) -> Tensor:
    """Σ over batch and shared positions of v v^T, ``[blocks, n, n]``."""
    flat = v.transpose(0, 1).flatten(1, 2)
    return flat.mT @ flat


def _squares(x: Tensor, h: Tensor, U_A: Tensor, U_C: Tensor) -> Tensor:
    B, g, T, a = x.shape
    c = h.shape[3]
    if T == 1:  # the square of a product is the product of squares
        return torch.einsum("bgtc,bgta->gca", (h @ U_C).square(), (x @ U_A).square())
    total = x.new_zeros(g, c, a)
    step = max(8, _CHUNK // max(1, g * c * a))
    for i in range(0, B, step):  # a sample's gradient has c rows to rotate, its inputs have T
        total += (U_C.mT @ (h[i : i + step].mT @ x[i : i + step]) @ U_A).square().sum(0)
    return total

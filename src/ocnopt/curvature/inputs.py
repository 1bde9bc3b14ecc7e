"""What the Kronecker curvature reads of a layer: sums over the inputs and adjoints of its samples.

A process that trains with others sees some of the samples only, or none; the sums are what they exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ocnopt.layers.base import Adapter, Call
from ocnopt.layers.outer import piece_of

if TYPE_CHECKING:
    from ocnopt.bucket import Bucket
    from ocnopt.players import Player


class Inputs:
    """Inputs x and adjoints h, ``[batch, blocks, shared, features]``, of one forward pass.

    A module used several times in one pass has more shared positions. Calls in continuous time make ∫x x^T dt and
    ∫h h^T dt: each is weighted by its duration, and all together they are one use, in however many solves.
    """

    def __init__(self, adapter: Adapter, calls: Sequence[Call]) -> None:
        self.adapter, self.calls, self.batch = adapter, calls, calls[0].batch
        shared = [adapter.kronecker_positions(call) for call in calls]
        self.shared = sum(shared)
        self.positions = sum(call.share * n for call, n in zip(calls, shared, strict=True))

    def sums(self) -> tuple[Tensor, Tensor]:
        """Σ x x^T and Σ h h^T."""
        A, C = zip(*map(self.adapter.kronecker_sums, self.calls), strict=True)
        return self._added(A), self._added(C)

    def squares(self, U_A: Tensor, U_C: Tensor) -> Tensor:
        """Σ_i (U_C^T g_i U_A)², g_i = Σ_t h_it x_it^T, ``[blocks, c, a]``: squared gradients of samples in the
        eigenbasis. The gradient of a sample has c rows to turn, its inputs have as many as there are positions.
        """
        g, a, c = *U_A.shape[:2], U_C.shape[1]
        few = self.shared * (a * a + c * c) < c * a * (a + c)
        numbers = g * (c * a + (self.shared * (a + c) if few else 0))
        numbers += sum((call.x.numel() + call.h.numel()) // max(1, self.batch) for call in self.calls)
        total = U_A.new_zeros(g, c, a)
        for part in self._parts(max(1, piece_of(U_A.device) // numbers)):
            total += self._by_inputs(part, U_A, U_C) if few else self._by_gradients(part, U_A, U_C)
        return total

    def _by_inputs(self, calls: Sequence[Call], U_A: Tensor, U_C: Tensor) -> Tensor:
        uses, roots = [self.adapter.kronecker_inputs(call) for call in calls], [call.duration**0.5 for call in calls]
        x = torch.cat([_scaled(use.x, root) for use, root in zip(uses, roots, strict=True)], 2).to(U_A) @ U_A
        h = torch.cat([_scaled(use.h, root) for use, root in zip(uses, roots, strict=True)], 2).to(U_C) @ U_C
        if self.shared == 1:  # the square of a product is the product of squares
            return h.square().squeeze(2).permute(1, 2, 0) @ x.square().squeeze(2).transpose(0, 1)
        return (h.mT @ x).square().sum(0)

    def _by_gradients(self, calls: Sequence[Call], U_A: Tensor, U_C: Tensor) -> Tensor:
        return squared(self._added([self.adapter.kronecker_gradients(call) for call in calls]).to(U_A), U_A, U_C)

    def _added(self, terms: Sequence[Tensor]) -> Tensor:
        first, *others = (_scaled(t, call.duration) for t, call in zip(terms, self.calls, strict=True))
        return sum(others, first)

    def _parts(self, step: int) -> Iterator[Sequence[Call]]:
        for i in range(0, self.batch, step):
            yield [call.rows(i, i + step) for call in self.calls]


class Seen(Protocol):
    """What a layer saw in a forward pass: :class:`Inputs`, or a :class:`~ocnopt.curvature.tally.Tally` of them."""

    @property
    def batch(self) -> int: ...

    @property
    def positions(self) -> float: ...

    def sums(self) -> tuple[Tensor, Tensor]: ...

    def squares(self, U_A: Tensor, U_C: Tensor) -> Tensor: ...


def seen_of(bucket: Bucket, player: Player, a: Tensor | None) -> list[Seen]:
    """By forward pass; those without a sample are left out."""
    assert player.adapter is not None
    passes = [(part, calls) for part, calls in bucket.calls[id(player)] if calls[0].batch]
    tallies = bucket.tallies[id(player)]
    if a is not None:
        passes = [(part, [call.weighted(part.expand(a)) for call in calls]) for part, calls in passes]
        tallies = [tally.weighted(a.squeeze()) for tally in tallies]  # of a single group
    return [*(Inputs(player.adapter, calls) for _, calls in passes), *tallies]


class Sums(NamedTuple):
    """What one process saw, or all of them: Σ x x^T and Σ h h^T, and over how many samples and positions."""

    A: Tensor
    C: Tensor
    samples: Tensor
    positions: Tensor

    @classmethod
    def over(cls, passes: Sequence[Seen], like_A: Tensor, like_C: Tensor) -> Sums:
        A, C = torch.zeros_like(like_A), torch.zeros_like(like_C)
        for one in passes:
            more_A, more_C = one.sums()
            A, C = A + more_A.to(A), C + more_C.to(C)
        samples, positions = sum(p.batch for p in passes), sum(p.batch * p.positions for p in passes)
        return cls(A, C, A.new_full((), samples), A.new_full((), positions))

    def factors(self) -> tuple[Tensor, Tensor]:
        """E[x x^T] and E[h̃ h̃^T], with h̃ = B·h."""
        positions = torch.where(self.positions > 0, self.positions, 1)
        return self.A / self.samples.clamp_min(1), self.C * (self.samples**2 / positions)


def squares_over(passes: Sequence[Seen], like: Tensor, U_A: Tensor, U_C: Tensor) -> Tensor:
    """Σ over the samples of all passes of :meth:`Inputs.squares`."""
    return sum((one.squares(U_A, U_C) for one in passes), torch.zeros_like(like))


def squared(G: Tensor, U_A: Tensor, U_C: Tensor) -> Tensor:
    """Σ_i (U_C^T g_i U_A)² of gradients ``[batch, blocks, c, a]``."""
    G = G.transpose(0, 1)
    turned = (G.flatten(1, 2) @ U_A).view(G.shape)
    return (U_C.mT[:, None] @ turned).square().sum(1)


def _scaled(v: Tensor, factor: float) -> Tensor:
    return v if factor == 1.0 else v * factor

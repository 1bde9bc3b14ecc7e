"""What the Kronecker curvature reads of a layer: sums over the inputs and adjoints of its samples.

A process that trains with others sees some of the samples only, or none; the sums are what they exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ocnopt.layers.base import Adapter, Call
from ocnopt.layers.outer import piece_of

if TYPE_CHECKING:
    from ocnopt.bucket import Bucket
    from ocnopt.players import Player


class Rows(NamedTuple):
    """Inputs and adjoints of samples, position by position: ``x: [blocks, batch · shared, a]``, ``h`` alike, with c."""

    x: Tensor
    h: Tensor
    shared: int

    def sums(self) -> tuple[Tensor, Tensor]:
        return self.x.mT @ self.x, self.h.mT @ self.h

    def gradients(self) -> Tensor:
        """Σ h x^T over shared: ``[blocks, batch, c, a]``."""
        x, h = (torch.unflatten(v, 1, (-1, self.shared)) for v in (self.x, self.h))
        return h.mT @ x

    def squares(self, numbers: int) -> Tensor:
        """Σ over samples of their squared gradients, some of them at a time."""
        if self.shared == 1:  # the square of a product is the product of squares
            return self.h.square().mT @ self.x.square()
        return added(_squares(part.gradients()) for part in self.parts(numbers))

    def turned(self, U_A: Tensor, U_C: Tensor) -> Rows:
        return Rows(self.x.to(U_A) @ U_A, self.h.to(U_C) @ U_C, self.shared)

    def parts(self, numbers: int) -> Iterator[Rows]:
        """Some samples at a time, each of which takes so many numbers."""
        step = max(1, piece_of(self.x.device) // max(1, numbers)) * self.shared
        for x, h in zip(self.x.split(step, 1), self.h.split(step, 1), strict=True):
            yield Rows(x, h, self.shared)


class Inputs:
    """Inputs x and adjoints h, ``[batch, blocks, shared, features]``, of one forward pass.

    A module used several times in one pass has more shared positions. Calls in continuous time make ∫x x^T dt and
    ∫h h^T dt: each is weighted by its duration, and all together they are one use, in however many solves.

    ``keep``: what the sums are formed of stays, unless it is large, for the squares.
    """

    def __init__(self, adapter: Adapter, calls: Sequence[Call], keep: bool = False) -> None:
        self.adapter, self.calls, self.batch = adapter, calls, calls[0].batch
        shared = [adapter.kronecker_positions(call) for call in calls]
        self.shared = sum(shared)
        self.positions = sum(call.share * n for call, n in zip(calls, shared, strict=True))
        self._keep = keep
        self._rows: Rows | None = None

    def sums(self, like_A: Tensor, like_C: Tensor) -> tuple[Tensor, Tensor]:
        """Σ x x^T and Σ h h^T."""
        numbers = self.batch * self.shared * len(like_A) * (like_A.shape[1] + like_C.shape[1])
        if self._keep and numbers <= piece_of(like_A.device) and all(map(self.adapter.sums_inputs, self.calls)):
            self._rows = self._formed(self.calls)
            return self._rows.sums()
        A, C = zip(*map(self.adapter.kronecker_sums, self.calls), strict=True)
        return self._added(A), self._added(C)

    def squares(self, U_A: Tensor, U_C: Tensor) -> Tensor:
        """Σ_i (U_C^T g_i U_A)², g_i = Σ_t h_it x_it^T, ``[blocks, c, n]``: squared gradients of samples in the
        eigenbasis, or in some of its coordinates. The gradient of a sample has c rows to turn, its inputs have as many
        as there are positions.
        """
        (g, a, n), c = U_A.shape, U_C.shape[1]
        each = g * c * a if self.shared > 1 else 0  # what a gradient takes, where it is formed
        if self.shared * (a * n + c * c) < c * n * (a + c):
            parts = map(self._formed, self._parts(g * self.shared * (a + c)))
            rows = parts if self._rows is None else [self._rows]
            return added(part.turned(U_A, U_C).squares(each) for part in rows)
        if self._rows is not None:
            return added(squared(part.gradients().to(U_A), U_A, U_C) for part in self._rows.parts(each))
        return added(squared(self._gradients(part).to(U_A), U_A, U_C) for part in self._parts(each))

    def _formed(self, calls: Sequence[Call]) -> Rows:
        uses = [(self.adapter.kronecker_inputs(call), call.duration**0.5) for call in calls]
        x, h = [_scaled(use.x, root) for use, root in uses], [_scaled(use.h, root) for use, root in uses]
        return Rows(_flat(x), _flat(h), self.shared)

    def _gradients(self, calls: Sequence[Call]) -> Tensor:
        """``[blocks, batch, c, a]``."""
        return self._added([self.adapter.kronecker_gradients(call) for call in calls]).transpose(0, 1)

    def _added(self, terms: Sequence[Tensor]) -> Tensor:
        return added(_scaled(t, call.duration) for t, call in zip(terms, self.calls, strict=True))

    def _parts(self, numbers: int) -> Iterator[Sequence[Call]]:
        """Some samples at a time, each of which takes so many numbers beyond those of its calls."""
        numbers += sum((call.x.numel() + call.h.numel()) // max(1, self.batch) for call in self.calls)
        step = max(1, piece_of(self.calls[0].h.device) // numbers)
        for i in range(0, self.batch, step):
            yield [call.rows(i, i + step) for call in self.calls]


class Seen(Protocol):
    """What a layer saw in a forward pass: :class:`Inputs`, or a :class:`~ocnopt.curvature.tally.Tally` of them."""

    @property
    def batch(self) -> int: ...

    @property
    def positions(self) -> float: ...

    def sums(self, like_A: Tensor, like_C: Tensor) -> tuple[Tensor, Tensor]: ...

    def squares(self, U_A: Tensor, U_C: Tensor) -> Tensor: ...


def seen_of(bucket: Bucket, player: Player, a: Tensor | None, keep: bool) -> list[Seen]:
    """By forward pass; those without a sample are left out."""
    assert player.adapter is not None
    passes = [(part, calls) for part, calls in bucket.calls[id(player)] if calls[0].batch]
    tallies = bucket.tallies[id(player)]
    if a is not None:
        passes = [(part, [call.weighted(part.expand(a)) for call in calls]) for part, calls in passes]
        tallies = [tally.weighted(a.squeeze()) for tally in tallies]  # of a single group
    return [*(Inputs(player.adapter, calls, keep) for _, calls in passes), *tallies]


#: of one process: known before anything has run on the device
Number = float | Tensor


class Sums(NamedTuple):
    """What one process saw, or all of them: Σ x x^T and Σ h h^T, and over how many samples and positions."""

    A: Tensor
    C: Tensor
    samples: Number
    positions: Number

    @classmethod
    def over(cls, passes: Sequence[Seen], like_A: Tensor, like_C: Tensor) -> Sums:
        samples, positions = sum(p.batch for p in passes), sum(p.batch * p.positions for p in passes)
        if not passes:
            return cls(torch.zeros_like(like_A), torch.zeros_like(like_C), samples, positions)
        A, C = zip(*(one.sums(like_A, like_C) for one in passes), strict=True)
        return cls(added(t.to(like_A) for t in A), added(t.to(like_C) for t in C), samples, positions)

    def to_add_up(self) -> Sums:
        """As tensors, which are the same over all processes once they are added up."""
        return Sums(self.A, self.C, *(self.A.new_full((), float(n)) for n in (self.samples, self.positions)))

    @property
    def shares(self) -> tuple[Number, Number]:
        """What they are to be multiplied by: the factors are E[x x^T] and E[h̃ h̃^T], with h̃ = B·h."""
        samples, positions = (n + (n == 0) for n in (self.samples, self.positions))
        return 1 / samples, samples**2 / positions


def squares_over(passes: Sequence[Seen], like: Tensor, U_A: Tensor, U_C: Tensor, seen: Tensor | None = None) -> Tensor:
    """Σ over the samples of all passes of :meth:`Inputs.squares`; ``seen``: of inputs, see
    :func:`~ocnopt.curvature.eigen.inputs_seen`.
    """
    if not passes or (seen is not None and not len(seen)):
        return torch.zeros_like(like)
    first = 0 if seen is None else U_A.shape[-1] - len(seen)
    found = added(one.squares(U_A[..., first:], U_C) for one in passes)
    return torch.nn.functional.pad(found, (first, 0)) if first else found


def squared(G: Tensor, U_A: Tensor, U_C: Tensor) -> Tensor:
    """Σ_i (U_C^T g_i U_A)² of gradients ``[blocks, batch, c, a]``."""
    turned = (G.flatten(1, 2) @ U_A).unflatten(1, G.shape[1:3])
    return _squares(U_C.mT[:, None] @ turned)


def _squares(G: Tensor) -> Tensor:
    """Σ over samples, ``[blocks, batch, c, a]``, of what nobody needs any more."""
    if G.is_cuda:  # nothing is written in between; on a CPU that takes ten times as long
        norms: Tensor = torch.linalg.vector_norm(G, dim=1)
        return norms.square_()
    return G.square_().sum(1)


def added(terms: Iterable[Tensor]) -> Tensor:
    """The sum of at least one, of which one is held at a time."""
    todo = iter(terms)
    return sum(todo, next(todo))


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """``[batch, blocks, shared, n]`` of some calls as ``[blocks, batch · shared, n]``."""
    whole = parts[0] if len(parts) == 1 else torch.cat(list(parts), 2)
    return whole.transpose(0, 1).flatten(1, 2)


def _scaled(v: Tensor, factor: float) -> Tensor:
    return v if factor == 1.0 else v * factor

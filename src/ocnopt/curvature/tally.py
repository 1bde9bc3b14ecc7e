"""The calls of a layer in one forward pass, added up to all that the Kronecker curvature reads of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from ocnopt.curvature.inputs import Inputs, added, squared
from ocnopt.layers.base import Adapter, Call, compute_dtype
from ocnopt.layers.outer import piece_of
from ocnopt.linalg import full_precision


class Tally:
    """Σ x x^T, Σ h h^T and the gradient of each sample, ``[batch, blocks, c, a]``, which can be seen from any basis.

    ``continuous``: the calls are those of solves, which are added solve by solve and together make a single one.
    """

    def __init__(self, adapter: Adapter, module: nn.Module, batch: int, continuous: bool) -> None:
        g, c, a = shape(adapter, module)
        like = next(iter(adapter.parameters(module).values())).detach()
        self.adapter, self.batch, self.continuous = adapter, batch, continuous
        self.dtype = compute_dtype(like.dtype)
        self.A, self.C = (like.new_zeros(g, n, n, dtype=self.dtype) for n in (a, c))
        self.G = like.new_zeros(batch, g, c, a, dtype=self.dtype)
        self.scale: Tensor | None = None  # the factor by which adjoints are to be multiplied, if any
        self._positions = self._length = 0.0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.A, self.C, self.G

    @torch.no_grad()
    def add(self, executions: Sequence[Sequence[Call]]) -> None:
        """Calls of one execution after another, of which each may be a solve."""
        lengths = [length_of(calls) if self.continuous else 1.0 for calls in executions]
        pairs = zip(executions, lengths, strict=True)
        joined = [replace(call, share=length * call.share) for calls, length in pairs for call in calls]
        inputs = Inputs(self.adapter, joined)
        with full_precision():
            A, C = inputs.sums(self.A, self.C)
            self.A += A
            self.C += C
            for call in joined:
                for rows in self._pieces():
                    part = call.rows(rows.start, rows.stop)
                    self.G[rows].add_(self.adapter.kronecker_gradients(part), alpha=call.duration)
        self._positions, self._length = self._positions + inputs.positions, self._length + sum(lengths)

    def _pieces(self) -> Iterator[slice]:
        """Some samples at a time."""
        step = max(1, piece_of(self.G.device) // max(1, self.G[:1].numel()))
        return (slice(i, min(i + step, self.batch)) for i in range(0, self.batch, step))

    @property
    def positions(self) -> float:
        return self._positions / self._length if self.continuous else self._positions

    @property
    def adjoints(self) -> Tensor:
        """The norm of each entry of h over all calls: it can be squared if they can."""
        return self.C.diagonal(dim1=1, dim2=2).sqrt()

    def weighted(self, factor: Tensor) -> Tally:
        """The same with all adjoints multiplied by a factor."""
        other = copy(self)
        other.scale = factor if self.scale is None else self.scale * factor
        return other

    def sums(self, like_A: Tensor, like_C: Tensor) -> tuple[Tensor, Tensor]:
        """As those of :class:`~ocnopt.curvature.inputs.Inputs`."""
        return self.A, self._scaled(self._scaled(self.C))

    def squares(self, U_A: Tensor, U_C: Tensor) -> Tensor:
        G = self.G.transpose(0, 1)
        return self._scaled(self._scaled(added(squared(G[:, rows], U_A, U_C) for rows in self._pieces())))

    def _scaled(self, t: Tensor) -> Tensor:
        return t if self.scale is None else t * self.scale.to(t)


def shape(adapter: Adapter, module: nn.Module) -> torch.Size:
    """``[blocks, c, a]`` of the matrix that the parameters of a layer make."""
    own = adapter.parameters(module)
    meta = {name: torch.empty(own[name].shape, device="meta") for name in adapter.kronecker_names(module)}
    return adapter.to_matrix(module, meta).shape


def numbers(adapter: Adapter, module: nn.Module, batch: int) -> int:
    """How many a tally holds."""
    g, c, a = shape(adapter, module)
    return g * (a * a + c * c + batch * c * a)


def length_of(calls: Sequence[Call]) -> float:
    """Of the solve that they are seen in."""
    return sum(call.duration for call in calls) / sum(call.share for call in calls)

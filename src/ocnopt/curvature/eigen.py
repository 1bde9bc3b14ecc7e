"""Eigenbases of layers: what is done in them, and how they are made, shared out among the processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ocnopt import whole_step
from ocnopt.distributed import World
from ocnopt.linalg import safe_eigh

#: eigenvalues and eigenvectors
Eigen = tuple[Tensor, Tensor]


@dataclass
class Inverse:
    """(U S U^T + λ)^{-1} with U = U_C ⊗ U_A, for matrices ``[blocks, c, a]``; without damping the pseudo-inverse, eq.
    (kfac-u).
    """

    S: Tensor
    U_A: Tensor
    U_C: Tensor
    damping: float
    seen: Tensor | None = None  # see :func:`inputs_seen`

    def __call__(self, V: Tensor) -> Tensor:
        if self.seen is None:
            return self.U_C @ self._divided(self.U_C.mT @ V @ self.U_A) @ self.U_A.mT
        found = V / self.damping if self.damping else torch.zeros_like(V)
        if len(self.seen):
            found[..., self.seen] = self._inside(V[..., self.seen])
        return found

    @cached_property
    def _inside(self) -> Inverse:
        """Of inputs that are seen."""
        assert self.seen is not None
        first = self.U_A.shape[-1] - len(self.seen)
        return Inverse(self.S[..., first:], self.U_A[:, self.seen, first:], self.U_C, self.damping)

    @cached_property
    def _damped(self) -> Tensor:
        return self.S + self.damping

    def _divided(self, V: Tensor) -> Tensor:
        if self.damping:
            return V / self._damped
        return torch.where(self.S.amax() * torch.finfo(self.S.dtype).eps < self.S, V / self.S, 0)


def inputs_seen(A: Tensor, S: Tensor, U_A: Tensor) -> Tensor | None:
    """The inputs that were not zero in all samples that A = E[x x^T] tells of, if these are few: the others are borders
    of images, or taps of a convolution that see nothing but padding. ``None``: all are to be treated alike.

    :func:`~ocnopt.linalg.safe_eigh` gives the others coordinates of their own, the first ones, in which S is zero, and
    whatever goes in and out of the basis can leave them out. It takes a look, which costs nothing on a CPU alone.
    """
    if len(A) > 1 or not whole_step.may_look(A):
        return None
    known = A[0].diagonal() != 0
    seen, others = known.nonzero()[:, 0], (~known).nonzero()[:, 0]
    first = len(others)
    if first < len(seen) or S[..., :first].any() or U_A[0, others, first:].any():
        return None
    return seen


def turned(S: Tensor, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Tensor:
    """The diagonal of U S U^T, ``[..., c, a]``, seen from another basis. Bases are those of A and C."""
    (old_A, old_C), (new_A, new_C) = old, new
    return (new_C.mT @ old_C).square() @ S @ (old_A.mT @ new_A).square()


def decompose(matrices: Sequence[Tensor], world: World) -> list[Eigen | None]:
    """Of positive semi-definite matrices ``[blocks, n, n]`` that are the same on all processes.

    Each is decomposed by one process, and a failure (``None``) is one for all.
    """
    owners = world.share([float(m.shape[0] * m.shape[-1] ** 3) for m in matrices])
    mine = [i for i, owner in enumerate(owners) if owner == world.rank]
    found = dict(zip(mine, batched([matrices[i] for i in mine]), strict=True))
    results = []
    for i, matrix in enumerate(matrices):
        values, vectors = found.get(i) or (torch.zeros_like(matrix[..., 0]), torch.zeros_like(matrix))
        results.append((values, vectors, matrix.new_full((), 0.0 if found.get(i) is None else 1.0)))
    world.sum_([t for result in results for t in result])  # all but one of the processes have zeros
    return [(values, vectors) if bool(there) else None for values, vectors, there in results]


def batched(matrices: Sequence[Tensor]) -> list[Eigen | None]:
    """Those of one size, and with the same zeros as far as one may look, at once; one by one only if that fails, since
    one of them may be to blame.
    """
    found: list[Eigen | None] = [None] * len(matrices)
    by_size: dict[tuple[Any, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        seen = tuple(matrix.diagonal(dim1=1, dim2=2).any(0).tolist()) if whole_step.may_look(matrix) else None
        by_size.setdefault((matrix.shape[-1], matrix.dtype, matrix.device, seen), []).append(i)
    for alike in by_size.values():
        whole = safe_eigh(torch.cat([matrices[i] for i in alike]))
        if whole is None:
            for i in alike if len(alike) > 1 else ():
                found[i] = safe_eigh(matrices[i])
            continue
        parts = [part.split([len(matrices[i]) for i in alike]) for part in whole]
        for i, values, vectors in zip(alike, *parts, strict=True):
            found[i] = values, vectors
    return found

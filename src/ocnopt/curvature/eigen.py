"""Eigenbases of layers: what is done in them, and how they are made, shared out among the processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ocnopt import whole_step
from ocnopt.distributed import World
from ocnopt.linalg import safe_eigh

#: eigenvalues and eigenvectors
Eigen = tuple[Tensor, Tensor]


def solved(V: Tensor, S: Tensor, U_A: Tensor, U_C: Tensor, damping: float, seen: Tensor | None = None) -> Tensor:
    """(U S U^T + λ)^{-1} V, of matrices ``[blocks, c, a]``; without damping the pseudo-inverse, eq. (kfac-u).

    ``seen``: see :func:`inputs_seen`.
    """
    if seen is None:
        return U_C @ _divided(U_C.mT @ V @ U_A, S, damping) @ U_A.mT
    first, found = U_A.shape[-1] - len(seen), V / damping if damping else torch.zeros_like(V)
    if len(seen):
        found[..., seen] = solved(V[..., seen], S[..., first:], U_A[:, seen, first:], U_C, damping)
    return found


def _divided(V: Tensor, S: Tensor, damping: float) -> Tensor:
    if damping:
        return V / (S + damping)
    return torch.where(S.amax() * torch.finfo(S.dtype).eps < S, V / S, 0)


def inputs_seen(A: Tensor, S: Tensor, U_A: Tensor) -> Tensor | None:
    """The inputs that were not zero in all samples that A = E[x x^T] tells of, if these are few: the others are borders
    of images, or taps of a convolution that see nothing but padding. ``None``: all are to be treated alike.

    :func:`~ocnopt.linalg.safe_eigh` gives the others coordinates of their own, the first ones, in which S is zero, and
    whatever goes in and out of the basis can leave them out. It takes a look, which is for nothing on a CPU alone.
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
        zeros = bytes(matrix.diagonal(dim1=1, dim2=2).any(0).numpy()) if whole_step.may_look(matrix) else None
        by_size.setdefault((matrix.shape[-1], matrix.dtype, matrix.device, zeros), []).append(i)
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

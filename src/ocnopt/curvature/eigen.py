"""Eigendecompositions, shared out among the processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ocnopt.distributed import World
from ocnopt.linalg import safe_eigh

#: eigenvalues and eigenvectors
Eigen = tuple[Tensor, Tensor]


def turned(S: Tensor, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Tensor:
    """The diagonal of U S U^T, ``[..., c, a]``, seen from another basis. Bases are those of A and C."""
    (old_A, old_C), (new_A, new_C) = old, new
    return (new_C.mT @ old_C).square() @ S @ (old_A.mT @ new_A).square()


def decompose(matrices: Sequence[Tensor], world: World) -> list[Eigen | None]:
    """Of positive semi-definite matrices ``[blocks, n, n]`` that are the same on all processes.

    Each is decomposed by one process, and a failure (``None``) is one for all.
    """
    owners = world.share([float(m.shape[0] * m.shape[-1] ** 3) for m in matrices])
    results = []
    for matrix, owner in zip(matrices, owners, strict=True):
        found = safe_eigh(matrix) if owner == world.rank else None
        values, vectors = found or (torch.zeros_like(matrix[..., 0]), torch.zeros_like(matrix))
        results.append((values, vectors, matrix.new_full((), 0.0 if found is None else 1.0)))
    world.sum_([t for result in results for t in result])  # all but one of the processes have zeros
    return [(values, vectors) if bool(there) else None for values, vectors, there in results]

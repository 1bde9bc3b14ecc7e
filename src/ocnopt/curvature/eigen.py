"""Eigendecompositions, shared out among the processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    mine = [i for i, owner in enumerate(owners) if owner == world.rank]
    found = dict(zip(mine, batched([matrices[i] for i in mine]), strict=True))
    results = []
    for i, matrix in enumerate(matrices):
        values, vectors = found.get(i) or (torch.zeros_like(matrix[..., 0]), torch.zeros_like(matrix))
        results.append((values, vectors, matrix.new_full((), 0.0 if found.get(i) is None else 1.0)))
    world.sum_([t for result in results for t in result])  # all but one of the processes have zeros
    return [(values, vectors) if bool(there) else None for values, vectors, there in results]


def batched(matrices: Sequence[Tensor]) -> list[Eigen | None]:
    """Those of one size at once; one by one only if that fails, since one of them may be to blame."""
    found: list[Eigen | None] = [None] * len(matrices)
    by_size: dict[tuple[Any, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        by_size.setdefault((matrix.shape[-1], matrix.dtype, matrix.device), []).append(i)
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

"""Gauss-Legendre quadrature: n nodes integrate polynomials of degree 2n − 1 exactly."""

from __future__ import annotations

from functools import cache

import torch


@cache
def gauss_legendre(n: int) -> tuple[tuple[float, float], ...]:
    """Nodes in (0, 1), ascending, and their weights, which add up to 1 (Golub & Welsch: an eigenvalue problem)."""
    k = torch.arange(1, n, dtype=torch.float64)
    off = k / (4 * k**2 - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return tuple(zip(((nodes + 1) / 2).tolist(), vectors[0].square().tolist(), strict=True))


def shared_out(nodes: int, intervals: int) -> int:
    """How many nodes an interval gets if there are many: four times as many as one alone would have, for all together,
    and one at least. A solve that goes from observation to observation is short and wants few; what the layers saw at
    each of them has to be kept.
    """
    return max(1, min(nodes, -(-4 * nodes // intervals)))

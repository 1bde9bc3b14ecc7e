"""Splits that depend on a seed and nothing else."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def stratified_indices(y: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split the samples in two, so that every class is in both parts in the same proportion.

    Args:
        y: class numbers, ``[N]``.
        fraction: of the samples that go to the second part, strictly between 0 and 1.
        seed: the same seed gives the same split, whatever has been drawn before.

    Returns:
        The sample numbers of the first and of the second part, each in ascending order.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must lie strictly between 0 and 1, got {fraction}.")
    labels = y.numpy()
    rng = np.random.default_rng(seed)
    second: list[int] = []
    for label, quota in zip(*_quotas(labels, fraction), strict=True):
        members = np.flatnonzero(labels == label)
        second.extend(rng.permutation(members)[:quota].tolist())
    taken = np.zeros(len(labels), dtype=bool)
    taken[second] = True
    if not 0 < taken.sum() < len(labels):
        raise ValueError(f"fraction {fraction} of {len(labels)} samples leaves one part empty.")
    return torch.from_numpy(np.flatnonzero(~taken)), torch.from_numpy(np.flatnonzero(taken))


def _quotas(labels: np.ndarray, fraction: float) -> tuple[list[int], list[int]]:
    """How many of each class go to the second part: whole numbers that add up to the rounded total."""
    classes, counts = np.unique(labels, return_counts=True)
    exact = counts * fraction
    quotas = np.floor(exact).astype(int)
    # The largest remainders are rounded up, so that the total is right and no class is off by more than one.
    missing = round(float(exact.sum())) - int(quotas.sum())
    quotas[np.argsort(quotas - exact, kind="stable")[:missing]] += 1
    return classes.tolist(), quotas.tolist()

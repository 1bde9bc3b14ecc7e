"""Time series as they come from the world: measured now and then."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ocnopt.lab.data.dataset import Dataset, Split


def irregular(dataset: Dataset, missing: float, *, stride: int = 1, seed: int = 0) -> Dataset:
    """Take a fraction ``missing`` of the observations out of every series, at times of its own.

    An observation is all channels at one time (Kidger et al., 2020). The series get one more channel, the last: 1 where
    there is an observation; elsewhere all channels are 0. What is lost depends on the seed and the split alone, not on
    the batch or the epoch.

    Args:
        dataset: time series, ``[N, T, D]``.
        missing: 0 loses nothing, and adds the channel; every series keeps one observation.
        stride: of the times, look at every so many-th only.
        seed: of what is lost.
    """
    if dataset.train.lengths is None or len(dataset.input_shape) != 2:
        raise ValueError(f"{dataset.name} is no time series, which alone can be sampled irregularly.")
    if not 0 <= missing < 1:
        raise ValueError(f"missing must lie in 0..1, 1 excluded, got {missing}.")
    if stride < 1:
        raise ValueError(f"stride must be at least 1, got {stride}.")
    parts = [dataset.train, dataset.test, dataset.validation]
    train, test, validation = (
        None if part is None else _thinned(part, missing, stride, 3 * seed + i) for i, part in enumerate(parts)
    )
    assert train is not None
    assert test is not None
    every = "" if stride == 1 else f", of every {stride} times one"
    note = f"{missing:.0%} of the observations of each series left out, seed {seed}{every}."
    shape, notes = tuple(train.values.shape[1:]), (*dataset.notes, note)
    return replace(dataset, train=train, test=test, validation=validation, input_shape=shape, notes=notes)


def _thinned(split: Split, missing: float, stride: int, seed: int) -> Split:
    assert split.lengths is not None
    assert split.mask is not None
    values, mask = split.values[:, ::stride], split.mask[:, ::stride]
    lengths = (split.lengths + stride - 1) // stride
    kept = _kept(values.shape[1], lengths, missing, seed)[..., None] & mask.any(-1, keepdim=True)
    return replace(
        split,
        values=torch.cat([torch.where(kept, values, 0.0), kept.to(values.dtype)], -1),
        mask=torch.cat([mask & kept, torch.ones_like(kept)], -1),
        lengths=lengths,
    )


def _kept(times: int, lengths: Tensor, missing: float, seed: int) -> Tensor:
    """``[N, times]``: of each series the same fraction, at times drawn without replacement."""
    drawn = torch.rand(len(lengths), times, generator=torch.Generator().manual_seed(seed))
    drawn[torch.arange(times) >= lengths[:, None]] = 2.0  # after the end nothing can be kept
    rank = drawn.argsort(1).argsort(1)
    count = (lengths - (missing * lengths).long()).clamp(min=1)
    return rank < count[:, None]

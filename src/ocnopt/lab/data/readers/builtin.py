"""WINE and DIGITS from scikit-learn, and the generated Circle."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn import datasets
from torch import Tensor

from ocnopt.lab.data.dataset import Dataset, Split
from ocnopt.lab.data.registry import ENTRIES
from ocnopt.lab.data.splits import stratified_indices

TEST_FRACTION = 0.2


def read_wine(split_seed: int) -> Dataset:
    """13 measurements, standardised with the mean and deviation of the train part."""
    bunch = datasets.load_wine()
    x = torch.from_numpy(np.asarray(bunch.data, dtype=np.float64))
    y = torch.from_numpy(np.asarray(bunch.target, dtype=np.int64))
    train, test = stratified_indices(y, TEST_FRACTION, split_seed)
    mean, std = x[train].mean(0), x[train].std(0, correction=0)
    x = ((x - mean) / std).float()
    return _classification("WINE", x, y, (train, test), tuple(map(str, bunch.target_names)), split_seed)


def read_digits(split_seed: int) -> Dataset:
    """Images ``[1, 8, 8]`` with 17 levels of grey, scaled to 0..1."""
    bunch = datasets.load_digits()
    x = torch.from_numpy(np.asarray(bunch.images, dtype=np.float32))[:, None] / 16
    y = torch.from_numpy(np.asarray(bunch.target, dtype=np.int64))
    parts = stratified_indices(y, TEST_FRACTION, split_seed)
    return _classification("DIGITS", x, y, parts, tuple(map(str, bunch.target_names)), split_seed)


def make_circle(seed: int) -> Dataset:
    """Two concentric circles, as in Chen et al. (2018): radii 1 and 0.5, Gaussian noise of deviation 0.06.

    The parts are drawn independently. Labels (0 outer, 1 inner) are kept for plots; a flow does not use them.
    """
    entry = ENTRIES["Circle"]
    # Independent streams for the parts, whatever the seed.
    states = np.random.SeedSequence(seed).generate_state(3)
    train, validation, test = (_circles(size, int(state)) for size, state in zip(entry.sizes, states, strict=True))
    note = f"Generated with seed {seed}."
    return Dataset(entry.name, entry.task, train, test, validation, (), (2,), "generated", notes=(note,))


def _circles(samples: int, state: int) -> Split:
    generated: tuple[NDArray[np.float64], NDArray[np.int64]] = datasets.make_circles(
        n_samples=samples, noise=0.06, factor=0.5, random_state=state
    )
    return Split(torch.from_numpy(generated[0]).float(), torch.from_numpy(generated[1]))


def _classification(
    name: str, x: Tensor, y: Tensor, parts: tuple[Tensor, Tensor], classes: tuple[str, ...], seed: int
) -> Dataset:
    entry = ENTRIES[name]
    whole = Split(x, y)
    train, test = (whole.take(part) for part in parts)
    note = f"No official split: {TEST_FRACTION:.0%} of each class is the test part, seed {seed}."
    shape = tuple(x.shape[1:])
    return Dataset(name, entry.task, train, test, None, classes, shape, "scikit-learn", notes=(note,))

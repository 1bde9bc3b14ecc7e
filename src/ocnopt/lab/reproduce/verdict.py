"""What numbers are worth: whether a network has learned at all, and whether a change is larger than its deviation."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from ocnopt.lab.data import Dataset

#: percentage points above guessing from which on a network counts as one that has learned something
MARGIN = 10.0


def guess_rate(dataset: Dataset) -> float:
    """The test accuracy, in percent, of whoever always names the most frequent class."""
    return 100 * float(dataset.test.y.bincount().max()) / len(dataset.test)


def has_learned(accuracies: Sequence[float], guess: float) -> bool:
    """Whether the mean over seeds is clearly above guessing."""
    return mean(accuracies) > guess + MARGIN


def exceeds(change: float, *deviations: float | None) -> bool:
    """Whether a change is larger than every deviation; a change without any deviation cannot be told from chance."""
    known = [deviation for deviation in deviations if deviation is not None]
    return bool(known) and abs(change) > max(known)


def deviation(values: Sequence[float]) -> float | None:
    """Over seeds; ``None`` where there is only one."""
    return stdev(values) if len(values) > 1 else None

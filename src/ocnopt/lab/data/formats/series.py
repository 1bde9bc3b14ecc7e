"""Time series as they come out of a file, and as the arrays that a network takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ocnopt.lab.data.errors import DataFormatError


@dataclass(frozen=True)
class SeriesFile:
    """The content of one ``.ts`` or ``.arff`` file.

    ``cases[i]`` is ``[D, T_i]`` with NaN where a value is missing; ``labels[i]`` is one of ``classes``.
    """

    cases: list[NDArray[np.float64]]
    labels: list[str]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class SeriesArrays:
    """Padded series: values ``[N, T, D]`` (NaN where there is none) and lengths ``[N]``."""

    values: NDArray[np.float64]
    lengths: NDArray[np.int64]

    @property
    def mask(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.values)


def stack_channels(channels: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Channels of one case as ``[D, T]``; a shorter one has missing values at its end."""
    length = max(len(channel) for channel in channels)
    case = np.full((len(channels), length), np.nan)
    for row, channel in zip(case, channels, strict=True):
        row[: len(channel)] = channel
    return case


def pad(cases: list[NDArray[np.float64]], steps: int, origin: str) -> SeriesArrays:
    """All cases in one array of ``steps`` steps."""
    values = np.full((len(cases), steps, len(cases[0])), np.nan)
    lengths = np.zeros(len(cases), dtype=np.int64)
    for number, case in enumerate(cases):
        lengths[number] = length_of(case)
        if not lengths[number]:
            raise DataFormatError(f"{origin}: series {number} has no values at all.")
        values[number, : case.shape[1]] = case.T[:steps]
    return SeriesArrays(values, lengths)


def length_of(case: NDArray[np.float64]) -> int:
    """Steps up to the last one that has a value: files of equal length mark the end of a series by "?"."""
    present = np.flatnonzero(~np.isnan(case).all(axis=0))
    return int(present[-1]) + 1 if len(present) else 0


def parse_numbers(text: str) -> NDArray[np.float64]:
    """Comma-separated numbers; "?" is a missing one. Raises ValueError on anything else."""
    if not text.strip():
        return np.empty(0)
    if "?" not in text:
        return np.array(text.split(","), dtype=np.float64)
    return np.array([np.nan if v.strip() == "?" else v for v in text.split(",")], dtype=np.float64)


def decode(content: bytes) -> str:
    """Text of the archives: mostly ASCII, with stray bytes of older encodings in the comments."""
    return content.removeprefix(b"\xef\xbb\xbf").decode("latin1")

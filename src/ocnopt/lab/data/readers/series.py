"""The time series of the UEA archive, from ``.ts`` or ``.arff`` files, loose or in an archive."""

from __future__ import annotations

import re

import numpy as np
import torch
from numpy.typing import NDArray

from ocnopt.lab.data.dataset import Dataset, Split
from ocnopt.lab.data.errors import DataFormatError
from ocnopt.lab.data.formats.archive import read_bytes, read_members
from ocnopt.lab.data.formats.arff import parse_dimensions, parse_relational
from ocnopt.lab.data.formats.series import SeriesArrays, SeriesFile, length_of, pad
from ocnopt.lab.data.formats.ts import parse_ts
from ocnopt.lab.data.locate import Found


def read_uea(found: Found) -> Dataset:
    """Both parts, padded to one length and standardised per channel with the values of the train part."""
    members = _members(found)
    train, test = (_parse(members, found, part) for part in ("TRAIN", "TEST"))
    if set(train.classes) != set(test.classes) or len(train.cases[0]) != len(test.cases[0]):
        raise DataFormatError(f"{found.folder}: the train and test parts differ in their classes or dimensions.")
    steps = max(length_of(case) for file in (train, test) for case in file.cases)
    arrays = [pad(file.cases, steps, f"{found.folder}") for file in (train, test)]
    mean, std = _channel_statistics(arrays[0])
    entry = found.entry
    return Dataset(
        name=entry.name,
        task=entry.task,
        train=_split(arrays[0], train.labels, train.classes, mean, std),
        test=_split(arrays[1], test.labels, train.classes, mean, std),
        validation=None,
        classes=train.classes,
        input_shape=(steps, len(mean)),
        source=str(found.folder),
    )


def _members(found: Found) -> dict[str, bytes]:
    """The series files of the form that was found, by name without ".gz"."""
    name, first = found.entry.name, found.files[0]
    if first.name.startswith(f"{name}Dimension"):
        return read_members(found.folder, re.compile(rf"^{name}Dimension\d+_(TRAIN|TEST)\.arff$"))
    if first.name.startswith(f"{name}_TRAIN."):
        return {path.name.removesuffix(".gz"): read_bytes(path) for path in found.files}
    return read_members(first, re.compile(rf"(^|/){name}(Dimension\d+)?_(TRAIN|TEST)\.(ts|arff)$"))


def _parse(members: dict[str, bytes], found: Found, part: str) -> SeriesFile:
    name = found.entry.name
    if content := members.get(f"{name}_{part}.ts"):
        return parse_ts(content, f"{name}_{part}.ts")
    if content := members.get(f"{name}_{part}.arff"):
        return parse_relational(content, f"{name}_{part}.arff")
    pattern = re.compile(rf"{name}Dimension(\d+)_{part}\.arff")
    numbered = sorted((int(m[1]), m[0]) for member in members if (m := pattern.fullmatch(member)))
    if not numbered:
        raise DataFormatError(f"{found.files[0]} holds no {part.lower()} series of {name}.")
    numbers, files = zip(*numbered, strict=True)
    if numbers != tuple(range(1, len(numbers) + 1)):
        raise DataFormatError(f"{found.files[0].parent}: a dimension is missing; only {', '.join(files)} are there.")
    return parse_dimensions([members[file] for file in files], files)


def _channel_statistics(arrays: SeriesArrays) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    channels = arrays.values.reshape(-1, arrays.values.shape[2])
    mean, std = np.nanmean(channels, axis=0), np.nanstd(channels, axis=0)
    std[std == 0] = 1.0  # a constant channel becomes 0, not NaN
    return mean, std


def _split(
    arrays: SeriesArrays,
    labels: list[str],
    classes: tuple[str, ...],
    mean: NDArray[np.float64],
    std: NDArray[np.float64],
) -> Split:
    number = {label: index for index, label in enumerate(classes)}
    # Padding and missing values become 0, the mean; the mask tells them from measured ones.
    values = np.nan_to_num((arrays.values - mean) / std, nan=0.0)
    return Split(
        values=torch.from_numpy(values).float(),
        y=torch.tensor([number[label] for label in labels]),
        lengths=torch.from_numpy(arrays.lengths),
        mask=torch.from_numpy(arrays.mask),
    )

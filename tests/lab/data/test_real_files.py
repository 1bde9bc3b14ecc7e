"""The real files, in the folder that ``OCNOPT_DATA`` names. What is not there is skipped; subsets are welcome.

Numbers of samples and label histograms are known for the complete sets and for subsets that take the first cases of
each part. Other subsets are checked for what must hold for any of them.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from ocnopt.lab.data import NAMES, Dataset, Split, check, find_entry, load
from ocnopt.lab.data.digests import file_digest, has_checksum
from ocnopt.lab.data.locate import Found, locate
from ocnopt.lab.data.registry import ENTRIES

DATA = os.environ.get("OCNOPT_DATA")
WITH_FILES = [name for name in NAMES if not ENTRIES[name].built_in]
IMAGES = ["MNIST", "FMNIST", "SVHN", "CIFAR10", "CIFAR100"]
SERIES = ["SpokenArabicDigits", "ArticularyWordRecognition", "CharacterTrajectories"]
CLASSIFICATION = [*IMAGES, *SERIES]


def found_files(name: str) -> Found:
    found = locate(find_entry(name), DATA) if DATA else None
    # the cache of these tests is empty, so what is found is in the folder
    if found is None:
        pytest.skip(f"no {name} in OCNOPT_DATA ({DATA or 'not set'})")
    return found


@cache
def _load(name: str) -> Dataset:
    return load(name, DATA)


def real(name: str) -> Dataset:
    found_files(name)
    return _load(name)


HISTOGRAMS: dict[tuple[str, str, int], list[int]] = {
    ("MNIST", "train", 60000): [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    ("MNIST", "test", 10000): [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ("FMNIST", "train", 60000): [6000] * 10,
    ("FMNIST", "test", 10000): [1000] * 10,
    ("SVHN", "train", 73257): [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659],
    ("SVHN", "test", 26032): [1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595],
    ("SVHN", "train", 10000): [684, 1926, 1422, 1138, 1067, 955, 772, 728, 673, 635],
    ("SVHN", "test", 4000): [271, 785, 611, 448, 396, 374, 303, 306, 253, 253],
    ("CIFAR10", "train", 50000): [5000] * 10,
    ("CIFAR10", "train", 10000): [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981],
    ("CIFAR10", "test", 10000): [1000] * 10,
    ("CIFAR100", "train", 50000): [500] * 100,
    ("CIFAR100", "test", 10000): [100] * 100,
    ("SpokenArabicDigits", "train", 6600): [660] * 10,
    ("SpokenArabicDigits", "test", 2200): [220] * 10,
    ("ArticularyWordRecognition", "train", 275): [11] * 25,
    ("ArticularyWordRecognition", "test", 300): [12] * 25,
    ("CharacterTrajectories", "train", 1422): [
        *(85, 70, 71, 78, 93, 69, 63, 87, 62, 65),
        *(70, 65, 62, 59, 66, 65, 77, 62, 68, 85),
    ],
    ("CharacterTrajectories", "test", 1436): [
        *(86, 71, 71, 79, 93, 69, 64, 87, 63, 65),
        *(71, 66, 62, 60, 67, 66, 78, 63, 69, 86),
    ],
}

FIRST_LABELS = {
    "MNIST": ([5, 0, 4, 1, 9], [7, 2, 1, 0, 4]),
    "FMNIST": ([9, 0, 0, 3, 0], [9, 2, 1, 1, 6]),
    "SVHN": ([1, 9, 2, 3, 2], [5, 2, 1, 0, 6]),
    "CIFAR10": ([6, 9, 9, 4, 1], [3, 8, 8, 0, 6]),
    "CIFAR100": ([19, 29, 0, 11, 1], [49, 33, 72, 51, 71]),
}


@pytest.mark.parametrize("name", WITH_FILES)
def test_sizes_and_shapes(name: str) -> None:
    data, entry = real(name), find_entry(name)
    sizes = (len(data.train), 0 if data.validation is None else len(data.validation), len(data.test))
    published = [entry.sizes, *entry.other_sizes]
    assert data.subset == (sizes not in published)
    assert any(all(a <= b for a, b in zip(sizes, p, strict=True)) for p in published)
    assert data.input_shape == entry.input_shape
    assert len(data.classes) == entry.classes
    for split in (data.train, data.test):
        assert split.values.shape == (len(split), *data.input_shape)
        assert split.values.dtype == (torch.uint8 if name in IMAGES else torch.float32)


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_label_histograms(name: str) -> None:
    data = real(name)
    for part, split in (("train", data.train), ("test", data.test)):
        counts = split.label_counts(len(data.classes))
        assert sum(counts) == len(split)
        assert min(counts) > 0
        assert counts == HISTOGRAMS.get((name, part, len(split)), counts)


@pytest.mark.parametrize("name", FIRST_LABELS)
def test_the_first_labels(name: str) -> None:
    data = real(name)
    assert (data.train.y[:5].tolist(), data.test.y[:5].tolist()) == FIRST_LABELS[name]


@pytest.mark.parametrize("name", IMAGES)
def test_the_normalisation_fits_the_images(name: str) -> None:
    data = real(name)
    x = data.train.batch(torch.arange(min(len(data.train), 10000))).x
    mean, std = x.mean((0, 2, 3)), x.std((0, 2, 3))
    # the constants are those of the complete train part; here the first 10,000 images are measured
    assert mean.abs().max() < 0.05
    assert (std - 1).abs().max() < 0.05


def test_the_names_of_the_classes() -> None:
    assert real("CIFAR10").classes[:3] == ("airplane", "automobile", "bird")
    assert real("CIFAR100").classes[-2:] == ("woman", "worm")


def test_an_upright_image_is_upright() -> None:
    """The first train image of CIFAR-10, a frog: its first red, green and blue bytes are known."""
    frog = real("CIFAR10").train.values[0]
    assert frog[:, 0, 0].tolist() == [59, 62, 63]
    assert frog[:, 0, 1].tolist() == [43, 46, 45]  # the pixel to its right
    assert frog[:, 1, 0].tolist() == [16, 20, 20]  # the pixel below


def test_an_upright_house_number_is_upright() -> None:
    first = real("SVHN").train.values[0]
    assert first[:, 0, 0].tolist() == [33, 30, 38]
    assert first[:, 0, 1].tolist() == [15, 23, 19]  # to its right
    assert first[:, 1, 0].tolist() == [28, 39, 35]  # below


LENGTHS = {
    "SpokenArabicDigits": (4, 93),
    "ArticularyWordRecognition": (144, 144),
    "CharacterTrajectories": (60, 182),
}


@pytest.mark.parametrize("name", SERIES)
def test_lengths_masks_and_standardisation_of_series(name: str) -> None:
    data = real(name)
    lengths = torch.cat([split.lengths for split in (data.train, data.test) if split.lengths is not None])
    assert (lengths.min().item(), lengths.max().item()) == LENGTHS[name]
    for split in (data.train, data.test):
        assert split.mask is not None
        assert split.lengths is not None
        inside = torch.arange(data.input_shape[0])[None] < split.lengths[:, None]
        assert torch.equal(split.mask.any(2), inside)
        assert (split.x[~split.mask] == 0).all()
    assert data.train.mask is not None
    values = [data.train.x[:, :, d][data.train.mask[:, :, d]] for d in range(data.input_shape[1])]
    torch.testing.assert_close(torch.stack([v.mean() for v in values]), torch.zeros(len(values)), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.stack([v.std() for v in values]), torch.ones(len(values)), atol=1e-4, rtol=0)


def test_ts_and_arff_hold_the_same_series(tmp_path: Path) -> None:
    """Where the archive's ARFF files lie beside the ``.ts`` files: equal, except at the ends of short channels."""
    name = "CharacterTrajectories"
    archive = found_files(name).folder / f"{name}_arff.tar.gz"
    if not archive.exists():
        pytest.skip(f"no {archive.name}")
    (tmp_path / archive.name).symlink_to(archive)
    ts, arff = real(name), load(name, tmp_path)
    assert arff.source == str(tmp_path)
    short = [_compare_series(*pair) for pair in ((ts.train, arff.train), (ts.test, arff.test))]
    assert short == [21, 18]


def _compare_series(a: Split, b: Split) -> int:
    """The number of series in which ``b`` has a channel that ends early. Elsewhere both have the same values."""
    assert a.mask is not None
    assert b.mask is not None
    assert torch.equal(a.y, b.y)
    assert torch.equal(a.lengths, b.lengths)  # type: ignore[arg-type]
    # The short channels change the mean a little, so values are compared up to that.
    both = a.mask & b.mask
    torch.testing.assert_close(a.x[both], b.x[both], atol=0.02, rtol=0)
    assert not (b.mask & ~a.mask).any()
    return int((a.mask & ~b.mask).any(2).any(1).sum())


def test_miniboone_is_standardised() -> None:
    data = real("Miniboone")
    assert data.validation is not None
    seen = torch.cat((data.train.x, data.validation.x)).double()
    torch.testing.assert_close(seen.mean(0), torch.zeros(43).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.std(0, correction=0), torch.ones(43).double(), atol=1e-5, rtol=0)
    assert data.test.x.abs().max() < 100
    raw = np.load(found_files("Miniboone").folder / "data.npy")
    assert abs(raw.mean(0)).max() > 100  # the file itself is not standardised


@pytest.mark.parametrize("name", ["MNIST", "FMNIST"])
def test_the_checksums_of_the_table_are_those_of_the_official_files(name: str) -> None:
    """Complete files at hand are the official ones, byte for byte; so the table can be checked against them."""
    data, found = real(name), found_files(name)
    if data.subset or found.files[0].suffix != ".gz":
        pytest.skip("not the official files")
    for path, remote in zip(found.files, find_entry(name).remotes, strict=True):
        assert remote.checksum is not None
        assert (path.name, path.stat().st_size) == (remote.filename, remote.size)
        assert has_checksum(path, remote.checksum), file_digest(path)


def test_fmnist_is_not_mistaken_for_mnist_when_its_folder_is_named(tmp_path: Path) -> None:
    folder = found_files("FMNIST").folder
    if real("FMNIST").subset:
        pytest.skip("not the official files")
    assert locate(find_entry("FMNIST"), folder) is not None
    assert locate(find_entry("MNIST"), folder) is None


@pytest.mark.parametrize("name", ["MNIST", "ArticularyWordRecognition", "Miniboone"])
def test_check_agrees(name: str) -> None:
    data = real(name)
    row = check(name, DATA)
    assert row.status == ("subset" if data.subset else "complete")
    assert (row.train, row.test, row.where) == (len(data.train), len(data.test), data.source)

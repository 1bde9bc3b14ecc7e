"""MNIST, FMNIST, SVHN, CIFAR10 and CIFAR100. Pixels stay bytes; the normalisation is the customary one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ocnopt.lab.data.dataset import Dataset, Normalisation, Split
from ocnopt.lab.data.errors import DataFormatError
from ocnopt.lab.data.formats.cifar import CIFAR10, CIFAR100, CifarLayout, read_cifar
from ocnopt.lab.data.formats.idx import read_idx
from ocnopt.lab.data.formats.mat import read_svhn_mat
from ocnopt.lab.data.locate import Found

_DIGITS = tuple("0123456789")
_CLOTHES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)

# Channel means and deviations of the complete train parts, pixels in 0..1, as commonly published. Constants
# and not measured: a subset must be normalised like the whole.
_MNIST = Normalisation.of_bytes((0.1307,), (0.3081,))
_FMNIST = Normalisation.of_bytes((0.2860,), (0.3530,))
_SVHN = Normalisation.of_bytes((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))
_CIFAR10 = Normalisation.of_bytes((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CIFAR100 = Normalisation.of_bytes((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def read_mnist(found: Found) -> Dataset:
    return _read_idx_set(found, _DIGITS, _MNIST)


def read_fmnist(found: Found) -> Dataset:
    return _read_idx_set(found, _CLOTHES, _FMNIST)


def read_svhn(found: Found) -> Dataset:
    train, test = (_split(*read_svhn_mat(path), _SVHN, 10, path) for path in found.files)
    return _dataset(found, train, test, _DIGITS)


def read_cifar10(found: Found) -> Dataset:
    return _read_cifar_set(found, CIFAR10, _CIFAR10)


def read_cifar100(found: Found) -> Dataset:
    return _read_cifar_set(found, CIFAR100, _CIFAR100)


def _read_idx_set(found: Found, classes: tuple[str, ...], normalisation: Normalisation) -> Dataset:
    def read(images_path: Path, labels_path: Path) -> Split:
        images = read_idx(images_path, dimensions=3)
        if images.shape[1:] != (28, 28):
            raise DataFormatError(f"{images_path} must hold images of 28x28, not {images.shape[1:]}.")
        labels = read_idx(labels_path, dimensions=1).astype(np.int64)
        return _split(images[:, None], labels, normalisation, len(classes), labels_path)

    return _dataset(found, read(*found.files[:2]), read(*found.files[2:]), classes)


def _read_cifar_set(found: Found, layout: CifarLayout, normalisation: Normalisation) -> Dataset:
    path = found.files[0]
    train, test, classes = read_cifar(path, layout)
    if len(classes) != found.entry.classes:
        raise DataFormatError(f"{path} names {len(classes)} classes instead of {found.entry.classes}.")
    splits = [_split(part.images, part.labels, normalisation, len(classes), path) for part in (train, test)]
    return _dataset(found, splits[0], splits[1], classes)


def _split(
    images: NDArray[np.uint8], labels: NDArray[np.int64], norm: Normalisation, classes: int, path: Path
) -> Split:
    if len(images) != len(labels) or not len(labels):
        raise DataFormatError(f"{path} has {len(labels)} labels for {len(images)} images.")
    if labels.min() < 0 or labels.max() >= classes:
        raise DataFormatError(f"{path} has labels {labels.min()} to {labels.max()}, beyond its {classes} classes.")
    return Split(torch.from_numpy(images), torch.from_numpy(labels), normalisation=norm)


def _dataset(found: Found, train: Split, test: Split, classes: tuple[str, ...]) -> Dataset:
    entry, source = found.entry, str(found.folder)
    return Dataset(entry.name, entry.task, train, test, None, classes, entry.input_shape, source)

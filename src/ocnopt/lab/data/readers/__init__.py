"""From the files of a dataset (or from nothing, when it is built in) to a ``Dataset``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ocnopt.lab.data.dataset import Dataset
from ocnopt.lab.data.locate import Found
from ocnopt.lab.data.readers.builtin import make_circle, read_digits, read_wine
from ocnopt.lab.data.readers.density import read_gas, read_miniboone
from ocnopt.lab.data.readers.images import read_cifar10, read_cifar100, read_fmnist, read_mnist, read_svhn
from ocnopt.lab.data.readers.series import read_uea
from ocnopt.lab.data.readers.text import read_genesis

BUILT_IN: Mapping[str, Callable[[int], Dataset]] = {
    "WINE": read_wine,
    "DIGITS": read_digits,
    "Circle": make_circle,
}
"""Datasets that need no files; the argument is the seed of the split (of the samples, for Circle)."""

TEXTS: Mapping[str, Callable[[int], Dataset]] = {"Genesis": read_genesis}
"""Texts that come along; the argument is the number of characters in a block."""

FROM_FILES: Mapping[str, Callable[[Found], Dataset]] = {
    "MNIST": read_mnist,
    "FMNIST": read_fmnist,
    "SVHN": read_svhn,
    "CIFAR10": read_cifar10,
    "CIFAR100": read_cifar100,
    "SpokenArabicDigits": read_uea,
    "ArticularyWordRecognition": read_uea,
    "CharacterTrajectories": read_uea,
    "Gas": read_gas,
    "Miniboone": read_miniboone,
}

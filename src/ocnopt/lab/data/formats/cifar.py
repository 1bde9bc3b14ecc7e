"""The Python version of CIFAR: pickled dictionaries with rows of 3072 bytes, in a tar archive or unpacked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocnopt.lab.data.errors import DataFormatError
from ocnopt.lab.data.formats.archive import read_members
from ocnopt.lab.data.formats.pickles import PickledArray, read_pickle

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True)
class CifarLayout:
    """Names of the files and of their fields, which differ between CIFAR-10 and CIFAR-100."""

    train: str  # a regular expression: CIFAR-10 has five train files
    test: str
    meta: str
    labels: str
    label_names: str


CIFAR10 = CifarLayout(r"data_batch_[1-5]", "test_batch", r"batches\.meta", "labels", "label_names")
CIFAR100 = CifarLayout("train", "test", "meta", "fine_labels", "fine_label_names")


@dataclass(frozen=True)
class CifarPart:
    images: NDArray[np.uint8]  # [N, 3, 32, 32]
    labels: NDArray[np.int64]  # [N]


def read_cifar(path: Path, layout: CifarLayout) -> tuple[CifarPart, CifarPart, tuple[str, ...]]:
    """The train part, the test part and the names of the classes."""
    wanted = re.compile(rf"(^|/)({layout.train}|{layout.test}|{layout.meta})$")
    members = read_members(path, wanted)
    batches = {name: _fields(content, f"{path}:{name}") for name, content in sorted(members.items())}

    def part(pattern: str) -> CifarPart:
        names = [name for name in batches if re.fullmatch(pattern, name)]
        if not names:
            raise DataFormatError(f"{path} holds no file named {pattern}.")
        parts = [_part(batches[name], layout.labels, f"{path}:{name}") for name in names]
        return CifarPart(np.concatenate([p.images for p in parts]), np.concatenate([p.labels for p in parts]))

    return part(layout.train), part(layout.test), _label_names(batches, layout, path)


def _fields(content: bytes, origin: str) -> dict[str, Any]:
    fields = read_pickle(content, origin)
    if not isinstance(fields, dict):
        raise DataFormatError(f"{origin} holds a {type(fields).__name__} instead of a dictionary.")
    return {k.decode("latin1") if isinstance(k, bytes) else str(k): v for k, v in fields.items()}


def _part(fields: dict[str, Any], labels_field: str, origin: str) -> CifarPart:
    for field in ("data", labels_field):
        if field not in fields:
            raise DataFormatError(f"{origin} has no field {field!r}.")
    pickled, labels = fields["data"], fields[labels_field]
    images = pickled.array if isinstance(pickled, PickledArray) else None
    if images is None or images.dtype != np.uint8 or images.shape[1:] != (_PIXELS,):
        raise DataFormatError(f"{origin}: 'data' must be an array of bytes with rows of {_PIXELS}.")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise DataFormatError(f"{origin}: {labels_field!r} must be a list of integers.")
    if len(labels) != len(images):
        raise DataFormatError(f"{origin} has {len(images)} images but {len(labels)} labels.")
    return CifarPart(images.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64))


def _label_names(batches: dict[str, dict[str, Any]], layout: CifarLayout, path: Path) -> tuple[str, ...]:
    for name, fields in batches.items():
        if re.fullmatch(layout.meta, name) and layout.label_names in fields:
            names = fields[layout.label_names]
            return tuple(n.decode("utf-8") if isinstance(n, bytes) else str(n) for n in names)
    raise DataFormatError(f"{path} holds no names of the classes ({layout.meta}).")

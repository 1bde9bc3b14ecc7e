"""IDX, the format of MNIST: a magic number, the shape in big-endian integers, then the values."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ocnopt.lab.data.errors import DataFormatError
from ocnopt.lab.data.formats.archive import read_bytes

_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """An array of unsigned bytes with the given number of dimensions, from a plain or compressed IDX file."""
    content = read_bytes(path)
    if len(content) < 4 or content[:2] != b"\0\0":
        raise DataFormatError(f"{path} is not an IDX file: it does not begin with the IDX magic number.")
    kind, ndim = content[2], content[3]
    if kind != _UNSIGNED_BYTE or ndim != dimensions:
        raise DataFormatError(
            f"{path} must hold unsigned bytes (type 0x08) in {dimensions} dimensions, "
            f"but has type {kind:#04x} in {ndim} dimensions."
        )
    start = 4 + 4 * ndim
    if len(content) < start:
        raise DataFormatError(f"{path} is cut short: its header is incomplete.")
    shape = struct.unpack(f">{ndim}I", content[4:start])
    expected = math.prod(shape)
    if len(content) - start != expected:
        raise DataFormatError(
            f"{path} should hold {expected} values of shape {shape} but holds {len(content) - start}."
        )
    # A copy, because the bytes object is read-only and torch wants to be able to write.
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()

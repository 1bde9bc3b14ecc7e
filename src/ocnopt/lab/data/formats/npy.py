"""Tables of numbers in NumPy's own format."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ocnopt.lab.data.errors import DataFormatError


def read_npy(content: bytes, origin: Path | str, columns: int) -> NDArray[np.float64]:
    """A table with this many columns, in float64. Arrays of pickled objects are refused."""
    try:
        table = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataFormatError(f"{origin} is not a readable .npy file of numbers ({error}).") from error
    if not isinstance(table, np.ndarray) or table.ndim != 2 or table.shape[1] != columns or not len(table):
        shape = getattr(table, "shape", "none")
        raise DataFormatError(f"{origin} must be a table with {columns} columns; its shape is {shape}.")
    if table.dtype.kind not in "iuf" or not np.isfinite(table).all():
        raise DataFormatError(f"{origin} must hold finite numbers only.")
    return table.astype(np.float64)

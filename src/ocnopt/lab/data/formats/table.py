"""Whitespace-separated text with one header line."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ocnopt.lab.data.errors import DataFormatError


def read_text_table(content: bytes, origin: Path | str, columns: range) -> NDArray[np.float64]:
    """Some columns of a text table; the first line is a header and is skipped."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy only warns about a table without rows
            return np.loadtxt(io.BytesIO(content), skiprows=1, usecols=columns, ndmin=2)
    except (ValueError, UserWarning) as error:
        raise DataFormatError(f"{origin} is not a text table with {columns.stop} columns ({error}).") from error

"""The MATLAB files of SVHN, cropped digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import scipy.io
from numpy.typing import NDArray

from ocnopt.lab.data.errors import DataFormatError


def read_svhn_mat(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images ``[N, 3, 32, 32]`` and labels 0..9. The file has the samples last and calls the digit 0 "10"."""
    try:
        content = scipy.io.loadmat(path, variable_names=["X", "y"])
    except Exception as error:  # scipy raises many kinds, zlib.error and NotImplementedError among them
        raise DataFormatError(f"{path} is not a readable MATLAB 5 file ({error}).") from error
    for field in ("X", "y"):
        if field not in content:
            raise DataFormatError(f"{path} has no variable {field!r}.")
    x, y = np.asarray(content["X"]), np.asarray(content["y"]).reshape(-1)
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[:3] != (32, 32, 3):
        raise DataFormatError(f"{path}: 'X' must be bytes of shape (32, 32, 3, N), not {x.dtype} {x.shape}.")
    if len(y) != x.shape[3]:
        raise DataFormatError(f"{path} has {x.shape[3]} images but {len(y)} labels.")
    if not np.isin(y, np.arange(1, 11)).all():
        raise DataFormatError(f"{path}: 'y' must hold the labels 1 to 10.")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y.astype(np.int64) % 10

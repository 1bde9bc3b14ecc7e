"""Every dataset of the paper, from its official files, and a text.

>>> from ocnopt.lab import data
>>> digits = data.load("DIGITS")
>>> len(digits.train), digits.input_shape, len(digits.classes)
(1438, (1, 8, 8), 10)
>>> for batch in data.Batches(digits.train, batch_size=719, seed=0):
...     print(tuple(batch.x.shape), tuple(batch.y.shape))
(719, 1, 8, 8) (719,)
(719, 1, 8, 8) (719,)

The way of a file: ``registry`` (what belongs to a dataset) → ``locate`` or ``download`` → ``readers`` (one
per kind of dataset), which use ``formats`` (one per file format) → ``dataset`` → ``batches``.
"""

from __future__ import annotations

from ocnopt.lab.data.batches import Batches
from ocnopt.lab.data.catalogue import CheckRow, DatasetRow, check, check_all, list_datasets
from ocnopt.lab.data.dataset import Batch, Dataset, Normalisation, Split, Task
from ocnopt.lab.data.errors import (
    ChecksumError,
    DataError,
    DataFormatError,
    DownloadError,
    MissingDataError,
    UnsafePickleError,
)
from ocnopt.lab.data.irregular import irregular
from ocnopt.lab.data.load import BLOCK_LENGTH, FetchRow, fetch, load
from ocnopt.lab.data.registry import NAMES, find_entry

__all__ = [
    "BLOCK_LENGTH",
    "NAMES",
    "Batch",
    "Batches",
    "CheckRow",
    "ChecksumError",
    "DataError",
    "DataFormatError",
    "Dataset",
    "DatasetRow",
    "DownloadError",
    "FetchRow",
    "MissingDataError",
    "Normalisation",
    "Split",
    "Task",
    "UnsafePickleError",
    "check",
    "check_all",
    "fetch",
    "find_entry",
    "irregular",
    "list_datasets",
    "load",
]

"""Gas and Miniboone, cleaned, split and standardised as by Papamakarios et al. (2017) and in FFJORD."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ocnopt.lab.data.dataset import Dataset, Split
from ocnopt.lab.data.errors import DataFormatError
from ocnopt.lab.data.formats.archive import read_bytes, read_members
from ocnopt.lab.data.formats.frame import read_frame
from ocnopt.lab.data.formats.npy import read_npy
from ocnopt.lab.data.formats.table import read_text_table
from ocnopt.lab.data.locate import Found

Table = NDArray[np.float64]

_NOT_SENSORS = ("Time", "Meth", "Eth")
_SENSORS = range(3, 19)
_CORRELATED = 0.98


def read_gas(found: Found) -> Dataset:
    """Eight of the sixteen sensors.

    The published pickle is a quarter of the rows of UCI's ``ethylene_CO.txt``, drawn at random by a seed
    that nobody noted. From the text a quarter is drawn likewise with seed 0: the same distribution, other
    rows.
    """
    path = found.files[0]
    notes: tuple[str, ...] = ()
    if path.suffix in (".txt", ".zip"):
        sensors = _quarter(_gas_text(path))
        notes = ("A quarter of the UCI rows, drawn with seed 0: not the rows that FFJORD used.",)
    else:
        sensors = _gas_pickle(path)
    table = drop_correlated(sensors)
    # The authors standardise with all rows, the test rows included, and with the unbiased deviation.
    table = (table - table.mean(0)) / table.std(0, ddof=1)
    return _dataset(found, split_in_order(table), notes)


def read_miniboone(found: Found) -> Dataset:
    """43 columns, from ``data.npy`` as published or from standardised ``train``, ``val`` and ``test.npy``."""
    columns = found.entry.input_shape[0]
    if len(found.files) == 3:
        train, validation, test = (read_npy(path.read_bytes(), path, columns) for path in found.files)
        return _dataset(found, (train, validation, test), ())
    path = found.files[0]
    content = _maf_member(path, "miniboone/data.npy") if path.suffix == ".gz" else path.read_bytes()
    train, validation, test = split_in_order(read_npy(content, path, columns))
    seen = np.concatenate((train, validation))  # the authors' choice: everything but the test rows
    mean, std = seen.mean(0), seen.std(0)
    standardised = ((train - mean) / std, (validation - mean) / std, (test - mean) / std)
    return _dataset(found, standardised, _other_parts_note(path))


def drop_correlated(table: Table) -> Table:
    """Remove the first column that correlates by more than 0.98 with another, again and again."""
    while True:
        close = (np.atleast_2d(np.corrcoef(table, rowvar=False)) > _CORRELATED).sum(axis=1)
        if not (close > 1).any():
            return table
        table = np.delete(table, int(np.argmax(close > 1)), axis=1)


def split_in_order(table: Table) -> tuple[Table, Table, Table]:
    """The last tenth is the test part, the last tenth of the rest the validation part."""
    tests = int(0.1 * len(table))
    validations = int(0.1 * (len(table) - tests))
    if not validations:
        raise DataFormatError(f"{len(table)} rows are too few to split into train, validation and test.")
    end = len(table) - tests
    return table[: end - validations], table[end - validations : end], table[end:]


def _gas_pickle(path: Path) -> Table:
    archived = path.suffix == ".gz"
    content = _maf_member(path, "gas/ethylene_CO.pickle") if archived else path.read_bytes()
    columns = read_frame(content, path)
    absent = [name for name in _NOT_SENSORS if name not in columns]
    if absent:
        raise DataFormatError(f"{path} has no column {absent[0]!r}; it has {', '.join(columns)}.")
    return _finite(np.stack([columns[name] for name in columns if name not in _NOT_SENSORS], axis=1), path)


def _gas_text(path: Path) -> Table:
    wanted = re.compile(r"(^|/)ethylene_CO\.txt$")
    content = read_bytes(path) if path.suffix == ".txt" else _member(path, wanted)
    return _finite(read_text_table(content, path, _SENSORS), path)


def _quarter(table: Table) -> Table:
    rows = np.random.default_rng(0).permutation(len(table))[: len(table) // 4]
    return table[rows]


def _finite(table: Table, path: Path) -> Table:
    if not np.isfinite(table).all():
        raise DataFormatError(f"{path} must hold finite numbers only.")
    return table


def _maf_member(archive: Path, name: str) -> bytes:
    return _member(archive, re.compile(rf"(^|/){re.escape(name)}$"))


def _member(archive: Path, wanted: re.Pattern[str]) -> bytes:
    members = read_members(archive, wanted, limit=1)
    if not members:
        raise DataFormatError(f"{archive} does not hold the file that was expected in it.")
    return members.popitem()[1]


def _other_parts_note(path: Path) -> tuple[str, ...]:
    others = [name for name in ("val.npy", "test.npy") if path.with_name(name).exists()]
    if not others:
        return ()
    return (f"{' and '.join(others)} beside {path.name} were left out: they may be on another scale.",)


def _dataset(found: Found, parts: tuple[Table, Table, Table], notes: tuple[str, ...]) -> Dataset:
    train, validation, test = (
        Split(torch.from_numpy(part).float(), torch.zeros(len(part), dtype=torch.int64)) for part in parts
    )
    entry, shape = found.entry, (parts[0].shape[1],)
    return Dataset(entry.name, entry.task, train, test, validation, (), shape, str(found.folder), notes=notes)

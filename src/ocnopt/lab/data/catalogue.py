"""What ``ocnopt data list`` and ``ocnopt data check`` show, as plain rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ocnopt.lab.data.dataset import Dataset, Split, Task
from ocnopt.lab.data.digests import is_as_noted
from ocnopt.lab.data.errors import DataError, MissingDataError
from ocnopt.lab.data.load import Folder, load
from ocnopt.lab.data.locate import Found, locate
from ocnopt.lab.data.registry import ENTRIES, Entry, find_entry


@dataclass(frozen=True)
class DatasetRow:
    """One dataset of ``ocnopt data list``. Sizes are those of the published set.

    ``official`` says whether the files that were found have the names and sizes of the published ones; others may hold
    a part of the samples only, which :func:`check` finds out.
    """

    name: str
    title: str
    task: Task
    train: int
    validation: int
    test: int
    input_shape: tuple[int, ...]
    classes: int
    status: Literal["built in", "found", "missing"]
    where: str
    official: bool
    download_bytes: int | None
    licence: str
    homepage: str


@dataclass(frozen=True)
class CheckRow:
    """One dataset of ``ocnopt data check``. Sizes are those of the files at hand; ``message`` explains it."""

    name: str
    status: Literal["complete", "subset", "missing", "broken"]
    train: int
    validation: int
    test: int
    where: str
    message: str


def list_datasets(data_dir: Folder | None = None) -> list[DatasetRow]:
    """All datasets, and whether their files are there. No file is opened."""
    return [_list_row(entry, data_dir) for entry in ENTRIES.values()]


def check(name: str, data_dir: Folder | None = None) -> CheckRow:
    """Read a dataset from beginning to end and look for faults. Raises only for an unknown name."""
    entry = find_entry(name)
    found = None if entry.built_in else locate(entry, data_dir)
    try:
        data = load(name, data_dir)
    except MissingDataError as error:
        return CheckRow(entry.name, "missing", 0, 0, 0, "", str(error))
    except DataError as error:
        return CheckRow(entry.name, "broken", 0, 0, 0, str(found.folder) if found else "", str(error))
    faults = [*_changed(found), *_faults(data, entry)]
    status: Literal["complete", "subset", "broken"] = "broken" if faults else "subset" if data.subset else "complete"
    validation = 0 if data.validation is None else len(data.validation)
    message = " ".join((*faults, *data.notes))
    return CheckRow(entry.name, status, len(data.train), validation, len(data.test), data.source, message)


def check_all(data_dir: Folder | None = None) -> list[CheckRow]:
    return [check(name, data_dir) for name in ENTRIES]


def _list_row(entry: Entry, data_dir: Folder | None) -> DatasetRow:
    found = None if entry.built_in else locate(entry, data_dir)
    sizes = [remote.size for remote in entry.remotes]
    known = [size for size in sizes if size is not None]
    return DatasetRow(
        entry.name,
        entry.title,
        entry.task,
        *entry.sizes,
        entry.input_shape,
        entry.classes,
        status="built in" if entry.built_in else "missing" if found is None else "found",
        where="" if found is None else str(found.folder),
        official=entry.built_in or (found is not None and _looks_official(found)),
        download_bytes=sum(known) if len(known) == len(sizes) else None,
        licence=entry.licence,
        homepage=entry.homepage,
    )


def _looks_official(found: Found) -> bool:
    sizes = {remote.filename: remote.size for remote in found.entry.remotes}
    sizes |= {Path(place).name: None for remote in found.entry.remotes for _, place in remote.members}
    return all(path.name in sizes and sizes[path.name] in (None, path.stat().st_size) for path in found.files)


def _changed(found: Found | None) -> list[str]:
    changed = [path.name for path in found.files if not is_as_noted(path)] if found else []
    return [f"{name} has changed since it was downloaded." for name in changed]


def _faults(data: Dataset, entry: Entry) -> list[str]:
    faults = []
    channels = -1 if data.train.lengths is not None else slice(None)  # the length of series may vary by release
    if data.input_shape[channels] != entry.input_shape[channels]:
        faults.append(f"Samples have the shape {data.input_shape} instead of {entry.input_shape}.")
    if len(data.classes) != entry.classes:
        faults.append(f"There are {len(data.classes)} classes instead of {entry.classes}.")
    for name, split in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        if split is not None:
            faults += _split_faults(name, split, entry)
    return faults


def _split_faults(name: str, split: Split, entry: Entry) -> list[str]:
    faults = []
    if split.values.is_floating_point() and not torch.isfinite(split.values).all():
        faults.append(f"The {name} part has values that are not finite.")
    if entry.task == "classification":
        empty = [number for number, count in enumerate(split.label_counts(entry.classes)) if not count]
        if empty:
            faults.append(f"The {name} part has no sample of {len(empty)} classes, the first being {empty[0]}.")
    return faults

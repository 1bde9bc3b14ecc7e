"""Load a dataset, fetching it first when asked to."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ocnopt.lab.data.dataset import Dataset
from ocnopt.lab.data.download import download as download_file
from ocnopt.lab.data.errors import DataFormatError, TransferError
from ocnopt.lab.data.locate import Found, cache_dir, locate, missing
from ocnopt.lab.data.readers import BUILT_IN, FROM_FILES, TEXTS
from ocnopt.lab.data.registry import Entry, Remote, find_entry

Folder = str | os.PathLike[str]

#: characters in a sample of text, unless somebody asks for another number
BLOCK_LENGTH = 64


@dataclass(frozen=True)
class FetchRow:
    """One file of ``ocnopt data fetch``; ``path`` is empty for data that comes with a library."""

    name: str
    path: str
    bytes: int
    status: Literal["built in", "present", "downloaded"]
    checked: str


def load(
    name: str,
    data_dir: Folder | None = None,
    *,
    download: bool = False,
    split_seed: int = 0,
    block_length: int = BLOCK_LENGTH,
    progress: bool = True,
) -> Dataset:
    """Load a dataset.

    Files are searched in ``data_dir``, then in the folder named by the environment variable
    ``OCNOPT_DATA``, then in the user's cache; in each of them in a subfolder named after the dataset or in
    the folder itself. The checksums of files that are found are *not* checked: they are the user's own, and
    may be a part of the official ones.

    Args:
        name: any of ``ocnopt.lab.data.NAMES``, in any case; ``"FashionMNIST"`` and the like are known too.
        data_dir: a folder to search first, and to download to.
        download: fetch the official files when none are found.
        split_seed: of the train/test split of WINE and DIGITS and of the samples of Circle; the other sets
            have a split of their own.
        block_length: of a text: how many characters make a sample.
        progress: show a progress bar while downloading.

    Raises:
        ValueError: there is no dataset of this name.
        MissingDataError: no files were found, and none could be downloaded if that was asked for; the message says
            where to put them and how to get them.
        DataFormatError: a file is damaged or not what it should be.
    """
    entry = find_entry(name)
    if entry.task == "text":
        return TEXTS[entry.name](block_length)
    if entry.built_in:
        return BUILT_IN[entry.name](split_seed)
    found = locate(entry, data_dir)
    if found is None and download:
        found = _fetched(entry, data_dir, progress)
    if found is None:
        raise missing(entry, data_dir)
    return read(found)


def _fetched(entry: Entry, data_dir: Folder | None, progress: bool) -> Found | None:
    try:
        fetch(entry.name, data_dir, progress=progress)
    except TransferError as error:
        raise missing(entry, data_dir, error) from error
    return locate(entry, data_dir)


def read(found: Found) -> Dataset:
    """Read files that were found, and say so when they are not the complete set."""
    data = FROM_FILES[found.entry.name](found)
    sizes, complete = _sizes(data), found.entry.sizes
    if sizes == complete or sizes in found.entry.other_sizes:
        return data
    note = f"{_describe(sizes)} instead of the {_describe(complete)} of the published set."
    return replace(data, subset=True, notes=(note, *data.notes))


def fetch(
    name: str,
    data_dir: Folder | None = None,
    *,
    force: bool = False,
    progress: bool = True,
    pause: float = 1.0,
) -> list[FetchRow]:
    """Download the official files of a dataset, unless it is there already.

    Args:
        name: of the dataset.
        data_dir: where to put the files; the user's cache by default, never the folder of ``OCNOPT_DATA``,
            which may be shared by many.
        force: fetch the official files even when some files were found, which may be a subset of them, and
            replace files of the same name in ``data_dir``. Official ones are not fetched again.
        progress: show a progress bar (on a terminal only).
        pause: seconds before a broken transfer is taken up again; doubled at each attempt.

    Raises:
        DownloadError: no server answered, or a file is not what it should be.
    """
    entry = find_entry(name)
    if entry.built_in:
        return [FetchRow(entry.name, "", 0, "built in", "comes with a library")]
    found = None if force else locate(entry, data_dir)
    if found is not None:
        return [_row(entry, path, "present", "not checked") for path in found.files]
    root = cache_dir() if data_dir is None else Path(data_dir).expanduser()
    rows = []

    def verify(path: Path) -> None:
        _verify_content(entry, path)

    for remote in entry.remotes:
        paths = download_file(remote, root, verify, replace=force, progress=progress, pause=pause)
        checked = remote.checksum.split(":")[0] if remote.checksum else "content"
        rows += [_row(entry, path, "downloaded", checked) for path in _own(entry, remote, paths)]
    return rows


def _verify_content(entry: Entry, path: Path) -> None:
    """A file without a published checksum must hold exactly the published number of samples."""
    data = read(Found(entry, path.parent, (path,)))
    if data.subset:
        raise DataFormatError(data.notes[0])


def _own(entry: Entry, remote: Remote, paths: list[Path]) -> list[Path]:
    """The files of this dataset, where one archive holds several."""
    return [p for p in paths if p.parent.name in entry.folders] if remote.members else paths


def _row(entry: Entry, path: Path, status: Literal["present", "downloaded"], checked: str) -> FetchRow:
    size = path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.iterdir())
    return FetchRow(entry.name, str(path), size, status, checked)


def _sizes(data: Dataset) -> tuple[int, int, int]:
    return len(data.train), 0 if data.validation is None else len(data.validation), len(data.test)


def _describe(sizes: tuple[int, int, int]) -> str:
    named = zip(sizes, ("train", "validation", "test"), strict=True)
    return ", ".join(f"{size:,} {name}" for size, name in named if size)

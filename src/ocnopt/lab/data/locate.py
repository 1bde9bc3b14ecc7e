"""Find the files of a dataset: in the folder the user names, in ``OCNOPT_DATA``, or in the user's cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import platformdirs

from ocnopt.lab.data.digests import file_digest
from ocnopt.lab.data.errors import MissingDataError
from ocnopt.lab.data.registry import ENTRIES, Entry, plain

DATA_VARIABLE = "OCNOPT_DATA"
CACHE_VARIABLE = "OCNOPT_CACHE"

# Folders that archives unpack to and that hold one subfolder per dataset.
_COLLECTIONS = {"uea", "multivariatets", "data"}
# Where other libraries keep the untouched files of a dataset, below its own folder.
_RAW = "raw"


@dataclass(frozen=True)
class Found:
    """The files of one form of a dataset, in the order of the form's patterns, and the folder they lie in."""

    entry: Entry
    folder: Path
    files: tuple[Path, ...]


def cache_dir() -> Path:
    """Where downloads go unless a folder is named: ``OCNOPT_CACHE``, else the system's place for caches."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path(platformdirs.user_cache_dir("ocnopt")) / "data"


def search_path(data_dir: str | os.PathLike[str] | None = None) -> list[Path]:
    """The data folders, in the order in which they are searched."""
    places = [data_dir, os.environ.get(DATA_VARIABLE) or None, cache_dir()]
    return list(dict.fromkeys(Path(p).expanduser() for p in places if p is not None))


def locate(entry: Entry, data_dir: str | os.PathLike[str] | None = None) -> Found | None:
    """The first complete form of the dataset in the first place that has one."""
    for root in search_path(data_dir):
        for folder in _folders(root, entry):
            for form in entry.forms:
                files = [_match(folder, pattern) for pattern in form]
                complete = tuple(f for f in files if f is not None)
                if len(complete) == len(form) and not (folder == root and _belongs_elsewhere(entry, complete)):
                    return Found(entry, folder, complete)
    return None


def missing(
    entry: Entry, data_dir: str | os.PathLike[str] | None = None, failure: Exception | None = None
) -> MissingDataError:
    """One sentence: what is missing, why it was not downloaded (where that failed), where to put it, how to get it."""
    places = search_path(data_dir)
    *names, last = (remote.filename for remote in entry.remotes)
    files = f"{', '.join(names)} and {last}" if names else last
    target = places[0] / entry.folders[0]
    searched = ", ".join(f"{p}" if p.is_dir() else f"{p} (no such folder)" for p in places)
    source = entry.remotes[0].urls[0].rpartition("/")[0] + "/"
    failed = "" if failure is None else f", and {str(failure).rstrip('.')}"
    return MissingDataError(
        f"{entry.name} was not found in {searched}{_partial(entry, places)}{failed}: put {files} from {source} into "
        f"{target}, name another folder with --data-dir or {DATA_VARIABLE}, or run "
        f"`ocnopt data fetch {entry.name}`."
    )


def _folders(root: Path, entry: Entry) -> Iterator[Path]:
    """Folders that may hold the files: those named after the dataset first, the data folder itself last."""
    names = {plain(name) for name in (entry.name, *entry.aliases, *entry.folders)}
    for folder in _subfolders(root):
        if plain(folder.name) in names:
            yield folder
            yield folder / _RAW
        elif plain(folder.name) in _COLLECTIONS:
            yield from (f for f in _subfolders(folder) if plain(f.name) in names)
    yield root


def _subfolders(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.is_dir()) if folder.is_dir() else []


def _match(folder: Path, pattern: str) -> Path | None:
    if not folder.is_dir():
        return None
    return min((f for f in folder.iterdir() if fnmatchcase(f.name, pattern)), default=None)


def _belongs_elsewhere(entry: Entry, files: tuple[Path, ...]) -> bool:
    """Whether the files are, byte for byte, another dataset's: MNIST and FMNIST have the same file names."""
    for other in ENTRIES.values():
        if other.name == entry.name or other.forms != entry.forms:
            continue
        sums = {remote.filename: remote.checksum for remote in other.remotes}
        if any(sums.get(f.name) == f"sha256:{file_digest(f)}" for f in files):
            return True
    return False


def _partial(entry: Entry, places: list[Path]) -> str:
    """Which files of a form are there while others are not, for the error message."""
    for root in places:
        for folder in _folders(root, entry):
            for form in entry.forms:
                absent = [pattern.replace("?", "-") for pattern in form if _match(folder, pattern) is None]
                if 0 < len(absent) < len(form):
                    return f" ({folder} has no {' and no '.join(absent)})"
    return ""

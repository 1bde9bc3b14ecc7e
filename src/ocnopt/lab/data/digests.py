"""Checksums of files, and the note that is kept beside a file for which nobody publishes one."""

from __future__ import annotations

import hashlib
from pathlib import Path


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, algorithm).hexdigest()


def has_checksum(path: Path, checksum: str) -> bool:
    """Whether a file has the checksum ``"algorithm:digest"``."""
    algorithm, digest = checksum.split(":")
    return file_digest(path, algorithm) == digest


def note_digest(path: Path) -> None:
    """Write down the sha256 of a file as it was downloaded, in the format of ``sha256sum``."""
    _note(path).write_text(f"{file_digest(path)}  {path.name}\n")


def is_as_noted(path: Path) -> bool:
    """False when a digest was noted and the file has changed since."""
    note = _note(path)
    return not note.exists() or note.read_text().split()[:1] == [file_digest(path)]


def _note(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")

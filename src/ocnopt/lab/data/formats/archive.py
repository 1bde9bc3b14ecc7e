"""Bytes out of plain or compressed files, and members out of folders, tar and zip archives."""

from __future__ import annotations

import gzip
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from ocnopt.lab.data.errors import DataFormatError

_GZIP, _XZ = b"\x1f\x8b", b"\xfd7zXZ\x00"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what a decompressor says about a bad file into one sentence that names the file."""
    try:
        yield
    except (
        EOFError,
        zlib.error,
        lzma.LZMAError,
        gzip.BadGzipFile,
        tarfile.TarError,
        zipfile.BadZipFile,
    ) as error:
        raise DataFormatError(f"{path} is damaged or cut short ({error}): replace it with a good copy.") from error


def read_bytes(path: Path) -> bytes:
    """The content of a file, decompressed when its first bytes are those of gzip or xz."""
    content = path.read_bytes()
    with reading(path):
        if content.startswith(_GZIP):
            return gzip.decompress(content)
        if content.startswith(_XZ):
            return lzma.decompress(content)
    return content


def read_members(path: Path, wanted: re.Pattern[str], limit: int | None = None) -> dict[str, bytes]:
    """Files whose path in a tar or zip archive, or whose name in a folder, matches ``wanted``.

    Nothing is unpacked to disk, so a hostile archive cannot write outside its place. A tar archive is read
    in one pass, because going back in a compressed one means decompressing it again; ``limit`` ends the
    pass early.

    Returns:
        File name (without folders) to content.
    """
    members: dict[str, bytes] = {}
    with reading(path):
        for name, content in _members(path, wanted):
            members[PurePosixPath(name).name] = content
            if len(members) == limit:
                break
    return members


def _members(path: Path, wanted: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    if path.is_dir():
        for file in sorted(f for f in path.iterdir() if f.is_file() and wanted.search(f.name)):
            yield file.name, read_bytes(file)
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in filter(wanted.search, archive.namelist()):
                yield name, archive.read(name)
    else:
        yield from _tar_members(path, wanted)


def _tar_members(path: Path, wanted: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            if not (member.isfile() and wanted.search(member.name)):
                continue
            stream = archive.extractfile(member)
            content = b"" if stream is None else stream.read()
            if len(content) != member.size:
                raise EOFError(f"{member.name} ends early")
            yield member.name, content

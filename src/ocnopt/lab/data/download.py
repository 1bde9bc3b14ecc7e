"""Downloads: checked by checksum, resumed after a break, one process at a time, with a progress bar.

pooch decides whether a file must be fetched and checks its sum; the transfer itself is ours, because pooch
cannot go on where a broken one stopped.
"""

from __future__ import annotations

import logging
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pooch  # type: ignore[import-untyped]
import requests
import urllib3
from filelock import FileLock
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ocnopt.lab.data.digests import has_checksum, note_digest
from ocnopt.lab.data.errors import ChecksumError, DataError, DownloadError, TransferError
from ocnopt.lab.data.formats.archive import reading
from ocnopt.lab.data.registry import Remote

_CHUNK = 1 << 18
_TIMEOUT = (10.0, 60.0)  # seconds to connect, seconds without a byte
_NETWORK_ERRORS = (requests.RequestException, urllib3.exceptions.HTTPError, ConnectionError)

pooch.get_logger().setLevel(logging.WARNING)  # the progress bar says what is going on


class BrokenTransfer(Exception):
    """The connection ended before the file did."""


class ResumingDownloader:
    """What pooch calls to transfer a file. A break is resumed, in this call or in a later one.

    The bytes that have arrived are kept beside the target as ``<name>.part``.

    Args:
        target: the file that will be made.
        progress: show a progress bar (on a terminal only).
        attempts: how often a broken transfer is taken up again before giving up.
        pause: seconds before the first new attempt; doubled each time.
    """

    def __init__(self, target: Path, *, progress: bool = True, attempts: int = 5, pause: float = 1.0) -> None:
        self.part = target.with_name(target.name + ".part")
        self.progress = progress
        self.attempts = attempts
        self.pause = pause
        self.resumed = False

    def __call__(self, url: str, output_file: str, pooch: Any, check_only: bool = False) -> None:
        for attempt in range(self.attempts):
            try:
                self._transfer(url)
                os.replace(self.part, output_file)
                return
            except (BrokenTransfer, *_NETWORK_ERRORS) as error:
                if attempt + 1 == self.attempts or _is_final(error):
                    raise TransferError(f"{url} could not be downloaded: {_reason(error)}.") from error
                time.sleep(self.pause * 2**attempt)

    def _transfer(self, url: str) -> None:
        have = self.part.stat().st_size if self.part.exists() else 0
        # "identity": a server must not compress on the way, or the byte counts would mean something else.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with requests.get(url, stream=True, timeout=_TIMEOUT, headers=headers) as response:
            if response.status_code == requests.codes.requested_range_not_satisfiable:
                self.part.unlink()
                raise BrokenTransfer("the part that was kept is not part of the file any more")
            response.raise_for_status()
            goes_on = response.status_code == requests.codes.partial_content
            if goes_on and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                self.part.unlink()
                raise BrokenTransfer("the server sent another part of the file than was asked for")
            self.resumed |= goes_on
            self._write(response, have if goes_on else 0)

    def _write(self, response: requests.Response, have: int) -> None:
        length = response.headers.get("Content-Length")
        total = have + int(length) if length is not None else None
        name = self.part.name.removesuffix(".part")
        with self.part.open("ab" if have else "wb") as out, _bar(name, have, total, self.progress) as advance:
            while chunk := response.raw.read(_CHUNK, decode_content=False):
                out.write(chunk)
                advance(len(chunk))
        if total is not None and self.part.stat().st_size != total:
            raise BrokenTransfer(f"only {self.part.stat().st_size} of {total} bytes arrived")


def download(
    remote: Remote,
    root: Path,
    verify: Callable[[Path], None],
    *,
    replace: bool = False,
    progress: bool = True,
    pause: float = 1.0,
) -> list[Path]:
    """Fetch one official file into ``root``, or what the table wants out of it, unless it is there already.

    Args:
        remote: the row of the table.
        root: the data folder.
        verify: called with a file that has no published checksum; raises when the content is wrong.
        replace: whether a file of this name that is not the official one may be replaced.
        progress, pause: see :class:`ResumingDownloader`.

    Returns:
        The files that are there now. Files appear under their name only when they are complete and checked.
    """
    target = root / remote.folder / remote.filename
    products = [root / place for _, place in remote.members] or [target]
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target):
        if not replace and all(_is_official(product, remote) for product in products):
            return products
        if remote.checksum is None:
            _fetch_unchecked(remote, target, verify, progress, pause)
        else:
            _fetch(remote, target, progress, pause)
        if remote.members:
            _extract(target, _wanted(remote, root, replace))
    return products


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Several processes of one run ask for the same data at the same moment; one fetches, the others wait."""
    lock = target.with_name(target.name + ".lock")
    with FileLock(lock):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)  # those who wait notice, and make a new one


def _is_official(product: Path, remote: Remote) -> bool:
    """Whether the file is there. One that is not the official one is the user's own: not ours to replace."""
    if not product.exists():
        return False
    if remote.checksum is not None and not remote.members and not has_checksum(product, remote.checksum):
        raise DownloadError(
            f"{product} is not the official file and is left alone; move it away, or replace it with --force."
        )
    return True


def _fetch_unchecked(
    remote: Remote, target: Path, verify: Callable[[Path], None], progress: bool, pause: float
) -> None:
    incoming = target.with_name(target.name + ".unchecked")
    _fetch(remote, incoming, progress, pause)
    try:
        verify(incoming)
    except DataError as error:
        incoming.unlink()
        raise DownloadError(f"{remote.filename} was downloaded but not kept: {error}") from error
    note_digest(incoming.replace(target))


def _fetch(remote: Remote, target: Path, progress: bool, pause: float) -> None:
    """Try the addresses one after another."""
    failures: list[DownloadError] = []
    for url in remote.urls:
        try:
            return _fetch_from(url, remote.checksum, target, progress, pause)
        except DownloadError as error:
            failures.append(error)
    # A wrong checksum says more than a mirror that is down.
    raise next((f for f in failures if isinstance(f, ChecksumError)), failures[-1])


def _fetch_from(url: str, checksum: str | None, target: Path, progress: bool, pause: float) -> None:
    """Fetch and check. When a *resumed* file is wrong, its first part was stale: once more from the start."""
    for _ in range(2):
        downloader = ResumingDownloader(target, progress=progress, pause=pause)
        try:
            pooch.retrieve(url, checksum, fname=target.name, path=target.parent, downloader=downloader)
            return
        except DownloadError:
            raise
        except ValueError as error:  # how pooch reports a wrong hash
            wrong = error
        if not downloader.resumed:
            break
    raise ChecksumError(
        f"{target.name} from {url} does not have the official checksum {checksum} and was not kept; "
        f"if you trust a copy of yours, put it at {target}, where nothing is checked."
    ) from wrong


def _wanted(remote: Remote, root: Path, replace: bool) -> dict[str, Path]:
    products = {member: root / place for member, place in remote.members}
    return {member: path for member, path in products.items() if replace or not path.exists()}


def _extract(archive: Path, wanted: dict[str, Path]) -> None:
    """Take members out of a tar archive, each in one atomic step, then delete the archive."""
    with reading(archive), tarfile.open(archive, "r|*") as tar:
        for member in tar:
            name = next((name for name in wanted if f"/{member.name}".endswith(f"/{name}")), None)
            stream = tar.extractfile(member) if name is not None else None
            if name is None or stream is None:
                continue
            product = wanted.pop(name)
            product.parent.mkdir(parents=True, exist_ok=True)
            part = product.with_name(product.name + ".part")
            with part.open("wb") as out:
                shutil.copyfileobj(stream, out, _CHUNK)
            os.replace(part, product)
            if not wanted:
                break
    if wanted:
        raise DownloadError(f"{archive} does not hold {', '.join(wanted)}.")
    archive.unlink()


def _is_final(error: Exception) -> bool:
    """A 404 stays a 404, and who is offline stays so for a while; a 503 may pass."""
    response = getattr(error, "response", None)
    return _is_unreachable(error) or (response is not None and 400 <= response.status_code < 500)


def _is_unreachable(error: Exception) -> bool:
    """Whether there was no connection at all, rather than one that broke."""
    cause = getattr(error.args[0], "reason", None) if error.args else None
    return isinstance(error, requests.exceptions.ProxyError) or isinstance(cause, urllib3.exceptions.NewConnectionError)


def _reason(error: Exception) -> str:
    """In words: what the libraries say is meant for those who wrote them."""
    response = getattr(error, "response", None)
    if isinstance(error, BrokenTransfer):
        return str(error)
    if response is not None:
        return f"the server answered {response.status_code} {response.reason}"
    if _is_unreachable(error):
        return "the server cannot be reached from here"
    return "the server did not answer" if isinstance(error, requests.Timeout) else "the connection broke"


@contextmanager
def _bar(name: str, have: int, total: int | None, show: bool) -> Iterator[Any]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not (show and console.is_terminal)) as bar:
        task = bar.add_task(name, total=total, completed=have)
        yield lambda count: bar.advance(task, count)

"""The kernels for a CPU, built when they are first needed, by the C compiler of the machine."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))

#: NaN and infinity are what they always are
FLAGS = (
    "-O3",
    "-fno-unswitch-loops",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fopenmp",
    "-std=c11",
    "-shared",
    "-fPIC",
)

#: for the processor at hand, where a compiler knows how
NATIVE = "-march=native"

#: what tells processors apart
_FEATURES = b"vendor_id", b"model name", b"flags", b"Features", b"CPU implementer", b"CPU part"

#: bytes at the end of a library that tell whether it is whole
_SEAL = hashlib.sha256().digest_size


class Unavailable(Exception):
    """Why there are no kernels."""


class Failed(Unavailable):
    """Something that should have built them did not."""

    said = False  # has somebody been told?


def load() -> ctypes.CDLL:
    """The library, from the cache of the user or built; without a cache that can be trusted, in a folder that is gone
    afterwards.
    """
    if sys.platform != "linux":
        raise Unavailable(f"kernels for a CPU are built on Linux, not on {sys.platform!r}")
    try:
        compilers = _compilers()
        folder = _cache_folder()
        kept = None if folder is None else folder / f"kernels-{_key(compilers)}.so"
        found = _kept(kept)
        if found is not None:
            return found
        with TemporaryDirectory(prefix="ocnopt-") as scratch:
            made = _built(compilers, Path(scratch))
            if kept is not None:
                _keep(made, kept)
            return _kept(kept) or ctypes.CDLL(str(made))
    except (OSError, ValueError) as error:
        raise Failed(f"kernels for a CPU cannot be built: {error}") from error


def _kept(path: Path | None) -> ctypes.CDLL | None:
    if path is not None and _is_whole(path):
        with suppress(OSError):  # nothing may be executed there
            return ctypes.CDLL(str(path))
    return None


def _compilers() -> list[list[str]]:
    named = shlex.split(os.environ.get("CC", ""))
    found = [named] if named else [[path] for path in map(shutil.which, ("cc", "gcc", "clang")) if path]
    if not found:
        raise Unavailable("there is no C compiler to build kernels for a CPU")
    return found


def _built(compilers: list[list[str]], scratch: Path) -> Path:
    made, reasons = scratch / "kernels.so", list[str]()
    for command in _commands(compilers):
        full = [*command, *(str(path) for path in SOURCES if path.suffix == ".c"), "-o", str(made), "-lm"]
        try:
            quiet = {"stdin": subprocess.DEVNULL, "capture_output": True, "errors": "replace"}
            done = subprocess.run(full, check=False, timeout=60, **quiet)  # type: ignore[call-overload]
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(str(error))
            continue
        if done.returncode == 0 and made.exists():
            made.write_bytes(_sealed(made.read_bytes()))
            return made
        said = done.stderr.strip().splitlines() or ["it does not say why"]
        reasons.append(f"{command[0]}: {said[0]}")
    raise Failed(f"kernels for a CPU cannot be built: {reasons[0]}")


def _commands(compilers: list[list[str]]) -> Iterator[list[str]]:
    for compiler in compilers:
        yield [*compiler, *FLAGS, NATIVE]
        yield [*compiler, *FLAGS]


def _keep(made: Path, kept: Path) -> None:
    """For processes to come. Those that do it at the same time do not meet: each puts a whole file there."""
    with suppress(OSError), TemporaryDirectory(dir=kept.parent) as beside:
        whole = Path(shutil.copy(made, beside))
        whole.chmod(0o700)  # whatever the system lets others do
        whole.replace(kept)


def _sealed(library: bytes) -> bytes:
    """What comes after the end is nobody's concern but ours."""
    return library + hashlib.sha256(library).digest()


def _is_whole(kept: Path) -> bool:
    """Part of a library that is mapped into memory ends the process."""
    try:
        if not _is_ours(kept):
            return False
        found = kept.read_bytes()
    except OSError:
        return False
    return len(found) > _SEAL and found == _sealed(found[:-_SEAL])


def _is_ours(path: Path) -> bool:
    """And can nobody else write to it?"""
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _cache_folder() -> Path | None:
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME", ""))
        folder = (root if root.is_absolute() else Path.home() / ".cache") / "ocnopt" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder if _is_ours(folder) else None
    except (OSError, RuntimeError):  # nobody has a home, or may enter it
        return None


def _key(compilers: list[list[str]]) -> str:
    """Of one source, compiler and kind of processor: homes are shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = []
    processor = sorted({line for line in lines if line.startswith(_FEATURES)})
    command = [os.uname().machine, *(" ".join(each) for each in _commands(compilers))]
    facts = [*(path.read_bytes() for path in SOURCES), *map(os.fsencode, command), *processor]
    return hashlib.sha256(b"\n".join(facts)).hexdigest()[:16]

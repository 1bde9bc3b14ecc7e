"""The kernels for a CPU, built when they are first needed, by the C compiler of the machine."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCE = Path(__file__).with_name("kernels.c")

#: for the processor at hand; NaN and infinity are what they always are
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-std=c11", "-shared", "-fPIC")

#: what tells processors apart
_FEATURES = ("vendor_id", "model name", "flags", "Features", "CPU implementer", "CPU part")


@cache
def library() -> ctypes.CDLL | str:
    """Or why there is none."""
    if sys.platform != "linux":
        return f"kernels for a CPU are built on Linux, not on {sys.platform!r}"
    compiler = _compiler()
    if compiler is None:
        return "there is no C compiler to build kernels for a CPU"
    try:
        with TemporaryDirectory(prefix="ocnopt-") as scratch:
            return ctypes.CDLL(str(_built(compiler, Path(scratch))))
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["it does not say why"]
        return f"{shlex.join(compiler)} cannot build kernels for a CPU: {said[0]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"kernels for a CPU cannot be built: {error}"


def _compiler() -> list[str] | None:
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        return named
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return None if found is None else [found]


def _built(compiler: list[str], scratch: Path) -> Path:
    """Where they are: in the cache of the user; or, if that cannot be written to, in ``scratch``.

    Processes that build at the same time do not meet, since each puts a whole file there.
    """
    name = f"kernels-{_key(compiler)}.so"
    kept = _cache_folder() / name
    if kept.exists():
        return kept
    made = scratch / name
    command = [*compiler, *FLAGS, str(SOURCE), "-o", str(made), "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryDirectory(dir=kept.parent) as beside:
            Path(shutil.copy(made, beside)).replace(kept)
    except OSError:
        return made
    return kept


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "ocnopt" / "kernels"


def _key(compiler: list[str]) -> str:
    """Of one source, compiler and kind of processor: homes are shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    processor = sorted({line for line in lines if line.startswith(_FEATURES)})
    facts = [SOURCE.read_text(), *FLAGS, *compiler, os.uname().machine, *processor]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]

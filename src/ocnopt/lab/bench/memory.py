"""The most memory that a piece of work holds at a time, beyond what was held before it."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import re
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """From here on: what torch allocates on a GPU, elsewhere what the process has in memory, as Linux counts it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before: int | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
        elif _STATUS.exists():
            _RESET.write_text("5")  # the peak starts from here
            self.before = _status("VmRSS")

    def bytes(self) -> int | None:
        """``None`` where the system does not tell."""
        if self.before is None:
            return None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return max(0, _status("VmHWM") - self.before)


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def give_back() -> None:
    """Let the system have what is free, now and from now on: memory is then what is held, as on a GPU, and not what an
    allocator keeps for later. Every tensor of more than a page becomes a mapping of its own, which is slow.
    """
    gc.collect()
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):  # the GNU C library
        library.mallopt(_MMAP_THRESHOLD, 4096)
        library.malloc_trim(0)


def apart(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """In a process of its own: memory that one piece of work leaves behind must not be another's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args, kwargs)

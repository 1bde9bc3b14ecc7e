"""Where the fused kernels can be had."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

#: of numbers that the kernels read
KINDS = (torch.float32, torch.bfloat16, torch.float16)

#: groups whose products fit into the registers of a program
MOST_GROUPS = 8

#: why kernels that were tried do not run here
_broken: str | None = None


@cache
def _kernels() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from ocnopt.fused import kernels

    return kernels


def kernels() -> ModuleType:
    """The module that needs Triton. Only if :func:`why_not_on` has nothing to say."""
    found = _kernels()
    assert found is not None
    return found


def why_not_on(device: torch.device) -> str | None:
    """Why no kernel of ours runs on a device."""
    if device.type not in ("cuda", "cpu"):
        return f"the kernels are written for CUDA, not for {device.type!r}"
    found = _kernels()
    if found is None:
        return "Triton is not installed"
    if (device.type == "cpu") != found.INTERPRETED:
        return "the parameters are on the CPU" if device.type == "cpu" else "Triton's interpreter is on"
    return _broken


def room_for(rank: int) -> int:
    """The next power of two."""
    return 1 << (rank - 1).bit_length()


def splits_on(device: torch.device, rank: int) -> bool:
    """Do kernels take a gradient for each of so many groups?"""
    return rank <= MOST_GROUPS and why_not_on(device) is None


def are_wanted(group: Mapping[str, Any]) -> bool:
    """May kernels move the parameters of a group, as far as its options and their dtype tell?"""
    paper = group["bellman"] == "paper" and group["feedback"] != "off"
    return group["fused"] is not False and not paper and all(p.dtype in KINDS for p in group["params"])


def breaks(error: Exception) -> None:
    """A kernel could not be built, for want of a compiler, say: from now on steps are made without."""
    global _broken
    _broken = f"Triton failed ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
    warnings.warn(f"steps are made without fused kernels, and slower: {_broken}", stacklevel=2)

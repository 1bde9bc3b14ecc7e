"""How the functions in C are called."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from ocnopt import whole_step
from ocnopt.fused.native.build import library


class Shelf(Structure):
    """``Shelf`` of kernels.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("chunks", "grads", "thetas", "momenta", "moments", "columns", "lines")),
        *((name, c_void_p) for name in ("places", "fractions", "decays")),
        *((name, c_int64) for name in ("coupled", "decoupled", "rank", "chunk", "threads")),
        *((name, c_float) for name in ("sign", "keep", "fresh", "weight", "eps", "share")),
    )


class Act(Structure):
    """``Act`` of kernels.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("w", "taken")),
        *((name, c_float) for name in ("mu", "intake", "players", "stride", "rate")),
        *((name, c_int64) for name in ("again", "ahead", "move", "carry")),
    )


def why_not(dtype: torch.dtype) -> str | None:
    """Why the kernels cannot be had."""
    if dtype != torch.float32:
        return f"on a CPU parameters of {dtype} are not supported"
    if whole_step.capturing():
        return "the step is being captured"
    found = library()
    return found if isinstance(found, str) else None


def is_plain(t: Tensor) -> bool:
    """Is it where it says, of numbers that the kernels read? Those of a fake tensor, say, are nowhere."""
    return t.dtype == torch.float32 and type(t).__torch_dispatch__ is Tensor.__torch_dispatch__


@cache
def kernels() -> ctypes.CDLL:
    """Only if :func:`why_not` has nothing to say."""
    found = library()
    assert isinstance(found, ctypes.CDLL)
    found.ocnopt_look.argtypes = POINTER(Shelf), c_int64, c_float, c_void_p, c_void_p, c_int64
    found.ocnopt_act.argtypes = POINTER(Shelf), POINTER(Act), c_int64, c_int64
    found.ocnopt_look.restype, found.ocnopt_act.restype = c_int64, None
    return found

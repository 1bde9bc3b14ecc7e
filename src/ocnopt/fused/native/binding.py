"""How the functions in C are called."""

from __future__ import annotations

import warnings
from ctypes import CDLL, POINTER, Structure, c_float, c_int64, c_void_p
from functools import cache
from threading import Lock

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from ocnopt import whole_step
from ocnopt.fused.native import build
from ocnopt.fused.sums import is_differentiated


class Shelf(Structure):
    """``Shelf`` of acting.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("chunks", "grads", "thetas", "momenta", "moments", "columns", "lines")),
        *((name, c_void_p) for name in ("places", "fractions", "decays")),
        *((name, c_int64) for name in ("coupled", "decoupled", "rank", "chunk", "threads")),
        *((name, c_float) for name in ("sign", "keep", "fresh", "weight", "eps", "share")),
    )


class Act(Structure):
    """``Act`` of acting.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("w", "taken")),
        *((name, c_float) for name in ("mu", "intake", "players", "stride", "rate")),
        *((name, c_int64) for name in ("again", "ahead", "move", "carry")),
    )


class Taps(Structure):
    """``Taps`` of taps.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "h", "pairs", "taps", "samples", "gradients")),
        *((name, c_int64) for name in ("pixels", "positions", "wide", "high", "inputs", "outputs")),
        *((name, c_int64) for name in ("kernel", "groups", "threads")),
    )


class Norm(Structure):
    """``Norm`` of norms.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "h", "mean", "scale", "weight", "samples", "into")),
        *((name, c_void_p) for name in ("products", "sums", "of_weight", "of_bias")),
        *((name, c_int64) for name in ("channels", "positions", "groups", "threads")),
    )


_LOCK = Lock()


def library() -> CDLL | str:
    """Or why there is none."""
    with _LOCK:  # threads that need it at the same time need one
        found = _library()
    if isinstance(found, CDLL):
        return found
    if isinstance(found, build.Failed) and not found.said:
        found.said = True
        warnings.warn(f"{found}; OCNOpt goes on without them, more slowly", RuntimeWarning, stacklevel=2)
    return str(found)


@cache
def _library() -> CDLL | build.Unavailable:
    try:
        found = build.load()
        found.ocnopt_look.argtypes = POINTER(Shelf), c_int64, c_float, c_void_p, c_void_p, c_int64
        found.ocnopt_act.argtypes = POINTER(Shelf), POINTER(Act), c_int64, c_int64
        found.ocnopt_taps.argtypes, found.ocnopt_norm.argtypes = (POINTER(Taps),), (POINTER(Norm),)
        found.ocnopt_look.restype, found.ocnopt_act.restype = c_int64, None
        found.ocnopt_taps.restype = found.ocnopt_norm.restype = None
        found.ocnopt_lanes.restype = c_int64
    except build.Unavailable as why:
        return why
    return found


def why_not(dtype: torch.dtype) -> str | None:
    """Why the kernels cannot be had."""
    if dtype != torch.float32:
        return f"on a CPU parameters of {dtype} are not supported"
    if whole_step.capturing():
        return "the step is being captured"
    found = library()
    return found if isinstance(found, str) else None


def kernels() -> CDLL:
    """Only if :func:`why_not` has nothing to say."""
    found = library()
    assert isinstance(found, CDLL)
    return found


def can_read(*tensors: Tensor) -> bool:
    """May kernels take these, whose graph ends there?"""
    if any(t.device.type != "cpu" or not is_plain(t) or is_differentiated(t) for t in tensors):
        return False
    return why_not(tensors[0].dtype) is None


def is_plain(t: Tensor) -> bool:
    """Are its numbers, as the kernels read them, where it says? Those of a fake tensor, say, are nowhere."""
    own = type(t).__torch_dispatch__ is Tensor.__torch_dispatch__ and not is_functorch_wrapped_tensor(t)
    return t.dtype == torch.float32 and own and not t.is_neg() and not t._is_zerotensor()

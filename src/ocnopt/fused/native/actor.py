"""Acting by the kernels for a CPU. Numbers are at hand there: what a policy asks for is passed on as such."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch import Tensor

from ocnopt import whole_step
from ocnopt.actor import Answer
from ocnopt.fused.actor import FusedActor
from ocnopt.fused.native.build import library
from ocnopt.fused.native.columns import Lines, in_order, lines_of

#: numbers of a parameter that one thread looks at before it takes the next ones
CHUNK = 2**14


class _Shelf(Structure):
    """``Shelf`` of kernels.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("chunks", "grads", "thetas", "momenta", "moments", "columns", "lines")),
        *((name, c_void_p) for name in ("places", "fractions", "decays")),
        *((name, c_int64) for name in ("coupled", "decoupled", "rank", "chunk", "threads")),
        *((name, c_float) for name in ("sign", "keep", "fresh", "weight", "eps", "share")),
    )


class _Act(Structure):
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


@dataclass
class NativeActor(FusedActor):
    groups: Tensor | None = field(init=False)  # [parameters]: addresses of the columns
    lines: Lines = field(init=False)

    @classmethod
    def chunk(cls) -> int:
        return CHUNK

    def look(self) -> bool:
        layout, params = self.layout, self.shelf.parts(self.params)
        groups = [] if self.columns is None else self.columns.tensors
        table = self._table(self.grads) if all(map(_is_plain, [*params, *self.grads, *groups])) else None
        if table is None:
            return False
        self.table, self.groups = table, None
        if self.columns is not None:
            self.columns = in_order(self.columns, params)
            self.groups = torch.tensor([*map(Tensor.data_ptr, self.columns.tensors)])
        self.lines, width = lines_of(params, self.columns), self.rank**2 + 2 * self.rank + 1
        self.rows = torch.empty(layout.width, width, dtype=torch.float32)
        partials = torch.empty(layout.total, width, dtype=torch.float64)
        _kernels().ocnopt_look(
            self._shelf, layout.total, self.momentum_cost, partials.data_ptr(), self.rows.data_ptr(), layout.width
        )
        return True

    def _act(self, answer: Answer | None, first: int, count: int, *, move: bool, carry: bool) -> None:
        if not self.fine:
            return
        rate, w = float(self.lr), self.taken if answer is None else answer.w.contiguous()
        act = _Act(
            w=w.data_ptr(),
            taken=self.taken.data_ptr(),
            mu=self.group["momentum"],
            intake=self.intake,
            players=self.fictitious,
            stride=rate / float(self._momentum_correction),
            rate=rate,
            again=answer is None,
            ahead=self.looks_ahead,
            move=move,
            carry=carry,
        )
        _kernels().ocnopt_act(self._shelf, act, first, count)

    @cached_property
    def _shelf(self) -> _Shelf:
        layout, group, keep = self.layout, self.group, self.group["decay"]
        thetas, momenta, moments = (row.data_ptr() for row in self.table.others)
        return _Shelf(
            chunks=layout.chunks.data_ptr(),
            grads=self.table.grads.data_ptr(),
            thetas=thetas,
            momenta=momenta if group["momentum"] else None,
            moments=moments if self._adaptive else None,
            columns=None if self.groups is None else self.groups.data_ptr(),
            lines=self.lines.table.data_ptr(),
            places=self.lines.places.data_ptr(),
            fractions=self.fractions.data_ptr(),
            decays=layout.decays(self.decays).data_ptr(),
            coupled=self.has_decay,
            decoupled=self.has_decoupled_decay,
            rank=self.rank,
            chunk=CHUNK,
            threads=torch.get_num_threads(),
            sign=self.sign,
            keep=keep,
            fresh=1 - keep,  # of more digits than the kernels have
            weight=float(self.moment.weight_of_average(keep)) if group["bias_correction"] else 1.0,
            eps=group["eps"],
            share=1 / self.fictitious,
        )


def _is_plain(t: Tensor) -> bool:
    """Is it where it says, of numbers that the kernels read? Those of a fake tensor, say, are nowhere."""
    return t.dtype == torch.float32 and type(t).__torch_dispatch__ is Tensor.__torch_dispatch__


@cache
def _kernels() -> ctypes.CDLL:
    found = library()
    assert isinstance(found, ctypes.CDLL)
    found.ocnopt_look.argtypes = POINTER(_Shelf), c_int64, c_float, c_void_p, c_void_p, c_int64
    found.ocnopt_act.argtypes = POINTER(_Shelf), POINTER(_Act), c_int64, c_int64
    found.ocnopt_look.restype = found.ocnopt_act.restype = None
    return found

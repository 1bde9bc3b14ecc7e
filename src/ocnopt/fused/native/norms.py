"""Gradients of a batch norm by group of samples, and all others with them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from ocnopt.fused.native.binding import Norm, kernels
from ocnopt.groups import Groups


def write(given: Sequence[Tensor], found: Sequence[Tensor], groups: Groups) -> None:
    """Of ``x``, ``h``, ``mean``, ``scale`` and ``weight``, which can be read and are contiguous: the gradient of ``x``,
    those of the groups ``[2, r, C]``, of weight and bias, and their sums.
    """
    x, (into, columns, *sums) = given[0], found
    samples = torch.tensor(groups.starts, device="cpu")
    pointers = (t.data_ptr() for t in (*given, samples, into, *columns, *sums))
    kernels().ocnopt_norm(byref(Norm(*pointers, x.shape[1], x[0, 0].numel(), groups.rank, torch.get_num_threads())))

"""Weight gradients of convolutions by group of samples, one tap of the kernel after another."""

from __future__ import annotations

from ctypes import byref
from math import prod

import torch
from torch import Tensor

from ocnopt.fused.native.binding import Taps, can_read, kernels
from ocnopt.groups import Groups
from ocnopt.layers.shifts import Axis
from ocnopt.layers.windows import Sight, seen_by_tap
from ocnopt.stock import Stock

#: channels of input and output that tiles of the kernel fit into
_WIDE, _HIGH = 32, 8

#: with shorter registers libraries are as quick
_LANES = 8


def fit(*tensors: Tensor) -> bool:
    return can_read(*tensors) and kernels().ocnopt_lanes() >= _LANES


def gradients(
    x: Tensor, h: Tensor, axes: tuple[Axis, ...], seen: Sight, groups: Groups, stock: Stock | None = None
) -> Tensor:
    """``[r, out, in, *taps]`` of tensors that :func:`fit`, in memory out of ``stock``."""
    inputs, outputs = x.shape[1], h.shape[1]
    x, h = _pixel_by_pixel(x, _WIDE), _pixel_by_pixel(h, _HIGH)
    shape = groups.rank, outputs, inputs, *seen.kernel
    found = x.new_empty(shape) if stock is None else stock.empty(shape, x.dtype)
    (pairs, starts), samples = seen_by_tap(axes, seen.ranges), torch.tensor(groups.starts, device="cpu")
    described = Taps(
        x=x.data_ptr(),
        h=h.data_ptr(),
        pairs=pairs.data_ptr(),
        taps=starts.data_ptr(),
        samples=samples.data_ptr(),
        gradients=found.data_ptr(),
        pixels=x.shape[1],
        positions=h.shape[1],
        wide=x.shape[2],
        high=h.shape[2],
        inputs=inputs,
        outputs=outputs,
        kernel=prod(seen.kernel),
        groups=groups.rank,
        threads=torch.get_num_threads(),
    )
    kernels().ocnopt_taps(byref(described))
    return found


def _pixel_by_pixel(x: Tensor, tile: int) -> Tensor:
    """``[B, channels, *space] -> [B, pixels, channels]``, with zeros up to whole tiles."""
    x = x.flatten(2).mT
    rest = -x.shape[-1] % tile
    return torch.nn.functional.pad(x, [0, rest]) if rest else x.contiguous()

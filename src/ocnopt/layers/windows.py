"""What the kernel of a convolution sees at each position.

On a small image some taps of the kernel see nothing but padding, wherever it is: of a kernel of 3×3, all but the one in
the middle, where there is a single pixel. Their gradients are zero, and need not be worked out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ocnopt import whole_step
from ocnopt.layers.shifts import Axis


class Sight(NamedTuple):
    """Neighbouring taps of a kernel, and what is to be padded so that these see what they do."""

    taps: tuple[slice, ...]  # by axis of space
    pads: tuple[int, ...]  # in the order of ``F.pad``, the last axis first; less than none is cut off afterwards

    @property
    def ranges(self) -> tuple[range, ...]:
        return tuple(range(taps.start, taps.stop) for taps in self.taps)

    @property
    def kernel(self) -> list[int]:
        return [taps.stop - taps.start for taps in self.taps]

    def of(self, x: Tensor) -> Tensor:
        if max(self.pads) > 0:
            x = F.pad(x, [max(n, 0) for n in self.pads])
        for axis, (before, after) in enumerate(zip(self.pads[::2], self.pads[1::2], strict=True), start=1):
            first = max(-before, 0)
            x = x.narrow(-axis, first, x.shape[-axis] - first - max(-after, 0))
        return x


@lru_cache(maxsize=1024)
def everything(axes: tuple[Axis, ...]) -> Sight:
    """All taps."""
    return _sight(axes, [range(axis.kernel) for axis in axes])


@lru_cache(maxsize=1024)
def sight(axes: tuple[Axis, ...]) -> Sight:
    """Those that see a pixel from some position, and what lies between them."""
    return _sight(axes, [[tap for tap in range(axis.kernel) if _sees(axis, tap)] for axis in axes])


def _sees(axis: Axis, tap: int) -> bool:
    """Is the first pixel that it comes to, from left to right, one of the image?"""
    first = tap * axis.dilation - axis.padding
    n = max(-(first // axis.stride), 0)
    return n < axis.positions and first + n * axis.stride < axis.size


def _sight(axes: tuple[Axis, ...], seeing: Sequence[Sequence[int]]) -> Sight:
    taps = tuple([slice(found[0], found[-1] + 1) if found else slice(0, 1) for found in seeing])
    pads: list[int] = []
    for axis, own in zip(axes, taps, strict=True):
        before = axis.padding - own.start * axis.dilation
        width = (own.stop - own.start - 1) * axis.dilation + 1
        pads = [before, (axis.positions - 1) * axis.stride + width - axis.size - before, *pads]  # the last axis first
    return Sight(taps, tuple(pads))


def windows(x: Tensor, axes: tuple[Axis, ...], blocks: int, seen: Sight | None = None) -> Tensor:
    """``[B, blocks, shared, channels of a block × kernel]``. ``seen``: of all taps, unless it says of which."""
    seen, space = seen or everything(axes), len(axes)
    x = seen.of(x)
    for dim, (axis, n) in enumerate(zip(axes, seen.kernel, strict=True), start=2):
        x = x.unfold(dim, axis.dilation * (n - 1) + 1, axis.stride)[..., :: axis.dilation]
    x = x.unflatten(1, (blocks, -1)).movedim(2, 2 + space)  # [B, blocks, *positions, channels, *kernel]
    return x.flatten(2 + space).flatten(2, 1 + space)


@lru_cache(maxsize=256)
def seen_by_tap(axes: tuple[Axis, ...], taps: tuple[range, ...]) -> tuple[Tensor, Tensor]:
    """``[pairs, 2]``: from which positions a tap sees which pixels, one tap after another; ``[taps + 1]``: where those
    of each begin.
    """
    found = []
    for chosen in product(*taps):
        pairs = torch.zeros(1, 2, dtype=torch.int32, device="cpu")
        for axis, tap in zip(axes, chosen, strict=True):
            places = torch.tensor(_pixels(axis, tap), dtype=torch.int32, device="cpu").reshape(-1, 2)
            size = torch.tensor([axis.positions, axis.size], dtype=torch.int32, device="cpu")
            pairs = (pairs[:, None] * size + places).flatten(0, 1)
        found.append(pairs)
    return torch.cat(found), torch.tensor([*accumulate(map(len, found), initial=0)], device="cpu")


def gram(x: Tensor, h: Tensor, axes: tuple[Axis, ...], blocks: int) -> Tensor:
    """``[B, B]``: K_ij = Σ_{p,q} ⟨h_ip, h_jq⟩ ⟨w_ip, w_jq⟩ over positions, without the windows w: where two of them lie
    decides which products of pixels add up to theirs. For images of few pixels.
    """
    pixels, outputs = _products(x, blocks), _products(h, blocks)
    return ((_meetings(axes, x.dtype, x.device) @ pixels) * outputs).sum((0, 1)).view(len(x), len(x))


def gram_cost(batch: int, axes: tuple[Axis, ...], a: int, c: int) -> int:
    """In multiplications, for each block of so many channels."""
    pixels, positions = (prod(sizes) for sizes in zip(*((axis.size, axis.positions) for axis in axes), strict=True))
    numbers: int = pixels**2 * a + positions**2 * c + (pixels * positions) ** 2
    return batch**2 * numbers


def _products(x: Tensor, blocks: int) -> Tensor:
    """``[blocks, places², B²]``: ⟨x_il, x_jm⟩ of ``[B, channels, *space]``."""
    batch, places = len(x), prod(x.shape[2:])
    rows = x.reshape(batch, blocks, -1, places).permute(1, 3, 0, 2).flatten(1, 2)
    return (rows @ rows.mT).view(blocks, places, batch, places, batch).transpose(2, 3).reshape(blocks, -1, batch**2)


@whole_step.remembered
def _meetings(axes: tuple[Axis, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[positions², pixels²]``: 1 where some tap sees pixel l from position p, and pixel m from position q."""
    seen = [[_pixels(axis, tap) for tap in range(axis.kernel)] for axis in axes]
    found = torch.zeros(*[axis.positions for axis in axes] * 2, *[axis.size for axis in axes] * 2)
    for taps in product(*seen):
        for pairs in product(*(product(own, own) for own in taps)):
            here, there = zip(*pairs, strict=True)
            (p, pixel), (q, other) = (zip(*each, strict=True) for each in (here, there))
            found[*p, *q, *pixel, *other] = 1
    positions = prod(axis.positions for axis in axes)
    return found.reshape(positions**2, -1).to(device, dtype)


def _pixels(axis: Axis, tap: int) -> list[tuple[int, int]]:
    """From which positions a tap sees which pixel."""
    first = tap * axis.dilation - axis.padding
    seen = [(n, first + n * axis.stride) for n in range(axis.positions)]
    return [(n, pixel) for n, pixel in seen if 0 <= pixel < axis.size]

"""Σ w w^T over the windows w of a convolution, without forming the windows.

Two pixels of a window are a fixed distance apart, so that the sum of their products over all windows is a product of
the image with a shifted copy of itself. How far apart they are decides which copy; where in the window they are decides
no more than where the sum begins and ends. A sum over a span of lines thus serves many pairs of pixels: a kernel of 3
has 9 pairs along an axis, and 5 distances, of which 2 are mirror images.

Zeros of the padding are never multiplied along an axis that is treated like this; the other axes are unfolded.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ocnopt import whole_step
from ocnopt.layers.outer import piece_of


class Prices(NamedTuple):
    """What things cost, in multiplications of a matrix product."""

    move: int  # a number that is copied
    call: int  # a product of shifted copies, by itself
    narrow: int  # a matrix product with fewer columns is not faster
    processors: int  # each of which takes one tile of a product of lines; a product of windows is cut up for all


#: a core: measured, 3x3 and 7x7 kernels of 3 to 512 channels
_CPU = Prices(128, 2**18, 16, 1)
#: an estimate for a large GPU, where a launch takes as long as 10^8 multiplications, and a product of shifted copies is
#: three of them
_OTHERS = Prices(64, 3 * 2**27, 128, 128)
#: pairs of pixels, times sums that go to them, of which there are about as many: more are neither kept nor worked out
_MOST = 2**23


@dataclass(frozen=True)
class Axis:
    """One dimension of space: how many pixels, how many windows, and what a window is."""

    size: int
    positions: int
    kernel: int
    stride: int
    dilation: int
    padding: int  # with zeros, on both sides

    def lines(self, phase: int) -> int:
        """Every ``stride``-th pixel, from ``phase`` on."""
        return max(0, -((phase - self.size) // self.stride))

    @property
    def overlaps(self) -> bool:
        """Do windows share pixels? Otherwise a sum serves one pair of them."""
        return self.stride <= self.dilation * (self.kernel - 1)


class Span(NamedTuple):
    """The lines ``left``, ``left + 1``, … of one phase, each with its partner ``right``, … of another, which windows
    hold as their pixels i and j.
    """

    phases: tuple[int, int]
    left: int
    right: int
    length: int
    pairs: tuple[tuple[int, int], ...]

    @property
    def distance(self) -> tuple[int, int, int]:
        return *self.phases, self.right - self.left

    @property
    def mirrored(self) -> tuple[int, int, int]:
        return *self.phases[::-1], self.left - self.right


@lru_cache(maxsize=64)
def spans(axis: Axis) -> tuple[Span, ...]:
    """Cut such that a span belongs to a pair of pixels as a whole, or not at all."""
    ranges = defaultdict(list)
    for pair in product(range(axis.kernel), range(axis.kernel)):
        (i, phase_i), (j, phase_j) = (divmod(axis.dilation * n - axis.padding, axis.stride) for n in pair)
        begin, end = max(i, 0, i - j), min(i + axis.positions, axis.lines(phase_i), axis.lines(phase_j) + i - j)
        if begin < end:
            ranges[phase_i, phase_j, j - i].append((begin, end, pair))
    found = []
    for (*phases, shift), members in ranges.items():
        cuts = sorted({cut for begin, end, _ in members for cut in (begin, end)})
        for left, right in pairwise(cuts):
            pairs = tuple(pair for begin, end, pair in members if begin <= left and right <= end)
            if pairs:
                found.append(Span((phases[0], phases[1]), left, left + shift, right - left, pairs))
    return tuple(found)


@lru_cache(maxsize=64)
def combinations(axes: tuple[Axis, ...]) -> tuple[tuple[Span, ...], ...]:
    """Of spans of all axes; of two that are mirror images of each other, one."""
    chosen = product(*map(spans, axes))
    return tuple(c for c in chosen if [s.distance for s in c] >= [s.mirrored for s in c])


@whole_step.remembered
def _placement(axes: tuple[Axis, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[pixels · pixels, combinations]``: which pairs of pixels of a window each sum belongs to. What is its own
    mirror image counts half.
    """
    every = combinations(axes)
    kernel = [axis.kernel for axis in axes]
    matrix = torch.zeros(*kernel, *kernel, len(every), dtype=dtype)
    for n, chosen in enumerate(every):
        weight = 0.5 if all(s.distance == s.mirrored for s in chosen) else 1.0
        for pairs in product(*(span.pairs for span in chosen)):
            matrix[*(i for i, _ in pairs), *(j for _, j in pairs), n] = weight
    return matrix.view(math.prod(kernel) ** 2, len(every)).to(device)


def outer(x: Tensor, axes: Sequence[Axis], blocks: int) -> Tensor:
    """``[B, blocks · channels, *space] -> [blocks, a, a]`` with a = channels · pixels of the kernel."""
    axes = tuple(axes)
    channels = x.shape[1] // blocks
    shifted = cheapest(axes, len(x), blocks, channels, x.device.type)
    rest = axes[shifted:]
    numbers = blocks * channels * math.prod(axis.size for axis in axes[:shifted])
    numbers *= math.prod(axis.positions * axis.kernel for axis in rest)
    parts = x.unflatten(1, (blocks, channels)).split(max(1, piece_of(x.device) // max(1, numbers)))
    sums = (_sums(_unfolded(part, rest), axes[:shifted]) for part in parts)
    total = sum(sums, next(sums))
    if not shifted:
        return total[0]
    pixels = math.prod(axis.kernel for axis in axes[:shifted])
    half = (_placement(axes[:shifted], x.dtype, x.device) @ total.flatten(1)).view(pixels, pixels, *total.shape[1:])
    whole = half + half.permute(1, 0, 2, 4, 3)
    whole = whole.unflatten(4, (channels, -1)).unflatten(3, (channels, -1))  # [i, j, blocks, c, …, c, …]
    a = channels * math.prod(axis.kernel for axis in axes)
    found: Tensor = whole.permute(2, 3, 0, 4, 5, 1, 6).reshape(blocks, a, a)
    return found


def cheapest(axes: tuple[Axis, ...], batch: int, blocks: int, channels: int, device: str) -> int:
    """How many axes to shift, 0 to 2, instead of unfolding them."""
    ways = (n for n in range(min(2, len(axes)) + 1) if _is_feasible(axes[:n]))
    return min(ways, key=lambda n: _cost(axes, n, batch, blocks, channels, device))


def _is_feasible(axes: tuple[Axis, ...]) -> bool:
    return all(axis.overlaps for axis in axes) and math.prod(axis.kernel for axis in axes) ** 4 <= _MOST


@lru_cache(maxsize=4096)
def _cost(axes: tuple[Axis, ...], shifted: int, batch: int, blocks: int, channels: int, device: str) -> float:
    prices = _CPU if device == "cpu" else _OTHERS
    rest = math.prod(axis.positions * axis.kernel for axis in axes[shifted:])
    samples = batch * math.prod(axis.positions for axis in axes[shifted:])
    f = channels * math.prod(axis.kernel for axis in axes[shifted:])
    count, lines, firsts = _totals(axes[:shifted])
    products: float = samples * lines * max(f, prices.narrow) ** 2
    copied = batch * channels * math.prod(axis.size for axis in axes[:shifted]) * rest
    if shifted and count:
        copied += 3 * (channels * math.prod(axis.kernel for axis in axes)) ** 2  # sums are put in place, and mirrored
        tiles = blocks * firsts / count * math.ceil(f / prices.narrow) ** 2  # of one product
        products *= max(1.0, prices.processors / tiles)
    return blocks * (products + prices.move * (copied + f**2 * firsts)) + prices.call * count


def _totals(axes: tuple[Axis, ...]) -> tuple[int, int, int]:
    """Of all combinations, without forming them: how many, the lines that they multiply, those of the first axis.

    The mirror image of a span is one of the same length. Half of the products over all spans are therefore chosen, and
    of those that are their own mirror images the other half, too.
    """
    found = [0, 0, 0]
    for own in (False, True):
        lengths = [[s.length for s in spans(axis) if not own or s.distance == s.mirrored] for axis in axes]
        counts, sums = [len(each) for each in lengths], [sum(each) for each in lengths]
        totals = math.prod(counts), math.prod(sums), math.prod((*sums[:1], *counts[1:]))
        found = [n + total for n, total in zip(found, totals, strict=True)]
    return found[0] // 2, found[1] // 2, found[2] // 2


def _unfolded(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """``[B, blocks, channels, *lines, *space of the axes] -> [*lines, blocks, B · positions, channels · kernel]``."""
    lines, space = x.dim() - 3 - len(axes), len(axes)
    x = F.pad(x, [n for axis in reversed(axes) for n in (axis.padding, axis.padding)])
    for dim, axis in enumerate(axes, start=3 + lines):
        x = x.unfold(dim, axis.dilation * (axis.kernel - 1) + 1, axis.stride)
        x = x.narrow(dim, 0, axis.positions)[..., :: axis.dilation]
    x = x.movedim(
        (1, 0, 2), (-3 - 2 * space, -2 - 2 * space, -1 - space)
    )  # [*lines, blocks, B, *positions, channels, …]
    return x.flatten(lines + 2 + space).flatten(lines + 1, lines + 1 + space)


def _sums(x: Tensor, axes: tuple[Axis, ...]) -> Tensor:
    """``[combinations, blocks, f, f]`` of ``x``: ``[*lines, blocks, N, f]``."""
    if not axes:
        return (x.mT @ x)[None]
    x = x.unsqueeze(1) if len(axes) == 1 else x
    x = x.transpose(1, 2)  # [lines, blocks, lines of the second axis, N, f]
    strides = [*(axis.stride for axis in axes), 1][:2]
    phases = {p: x[p[0] :: strides[0], :, p[1] :: strides[1]].contiguous() for p in product(*map(range, strides))}
    found = []
    for first, second in (chosen if len(chosen) == 2 else (*chosen, _ONE) for chosen in combinations(axes)):
        left, right = (
            _slab(phases[p, q], begin, first.length, start, second.length)
            for p, q, begin, start in zip(
                first.phases, second.phases, (first.left, first.right), (second.left, second.right), strict=True
            )
        )
        found.append((left.mT @ right).unflatten(0, (first.length, -1)).sum(0))
    blocks, f = x.shape[1], x.shape[-1]
    return torch.stack(found) if found else x.new_empty(0, blocks, f, f)  # no window reaches the image


#: the only line of an axis that is not there
_ONE = Span((0, 0), 0, 0, 1, ((0, 0),))


def _slab(x: Tensor, begin: int, lines: int, start: int, length: int) -> Tensor:
    """Lines of both axes, ``[lines · blocks, length · N, f]``: a view, since nothing lies in between."""
    return x[begin : begin + lines, :, start : start + length].flatten(0, 1).flatten(1, 2)

"""Where the numbers of group gradients are, for the kernels.

A parameter is lines of numbers, all of which have a gradient for each group in the same places: the taps of a kernel
that see more than padding. Most have it in all places, and are lines of one number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ocnopt.fused.tables import laid_out
from ocnopt.gradients import Columns
from ocnopt.layers.base import spread

#: as that of acting.c: of longer lines all of a gradient is laid out
BLOCK = 512

#: what there is of each dimension, and how much of it has a gradient
Dimensions = tuple[tuple[int, range], ...]


class Lines(NamedTuple):
    table: Tensor  # [parameters, 3]: numbers in a line, how many of them columns have, and where `places` tells which
    places: Tensor  # in as many lines as fit a block


def lines_of(params: Sequence[Tensor], columns: Columns | None) -> Lines:
    parts = {} if columns is None else columns.parts
    return _lines(tuple(_dimensions(p, parts[i]) if i in parts else () for i, p in enumerate(params)))


def in_order(columns: Columns, params: Sequence[Tensor]) -> Columns:
    """Each column one after another, laid out as its parameter is."""
    tensors, parts = list[Tensor](), {}
    for i, (G, p) in enumerate(zip(columns.tensors, params, strict=True)):
        part = columns.parts.get(i, ())
        if part and p.is_contiguous() and _length(_dimensions(p, part)) <= BLOCK:
            parts[i] = part
            tensors.append(G.contiguous())
        else:
            tensors.append(laid_out(spread(G, part, p.shape), p))
    return Columns(tensors, parts)


def _dimensions(p: Tensor, part: Sequence[slice]) -> Dimensions:
    """From the first one on of which not all has a gradient."""
    found = [(n, range(n)[some]) for n, some in zip(p.shape, part, strict=True)]
    first = next((i for i, (n, some) in enumerate(found) if len(some) < n), len(found))
    return tuple(found[first:])


def _length(dimensions: Dimensions) -> int:
    return prod(n for n, _ in dimensions)


@lru_cache(maxsize=64)
def _lines(parameters: tuple[Dimensions, ...]) -> Lines:
    rows, places, known = [], list[int](), dict[Dimensions, int]()
    for dimensions in parameters:
        line, here = _length(dimensions), list(_places(dimensions))
        if dimensions not in known:
            known[dimensions] = len(places)
            places += [i * line + place for i in range(BLOCK // len(here)) for place in here]
        rows.append((line, len(here), known[dimensions]))
    return Lines(torch.tensor(rows, device="cpu"), torch.tensor(places, dtype=torch.int32, device="cpu"))


def _places(dimensions: Dimensions) -> Iterator[int]:
    strides = [prod(n for n, _ in dimensions[i + 1 :]) for i in range(len(dimensions))]
    for at in product(*(some for _, some in dimensions)):
        yield sum(i * stride for i, stride in zip(at, strides, strict=True))

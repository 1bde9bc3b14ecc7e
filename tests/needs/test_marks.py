"""Whoever writes to a gradient between the backward pass and the step is noticed, whatever way it is done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ocnopt.marks import _ROW, Mark


def _swap(g: Tensor) -> None:
    g.data.view(-1)[:2] = g.data.view(-1)[:2].flip(0)


def _swap_rows(g: Tensor) -> None:
    flat = g.data.view(-1)
    flat[: 2 * _ROW] = flat[: 2 * _ROW].view(2, _ROW).flip(0).reshape(-1)


def _last(g: Tensor) -> None:
    g.data.view(-1)[-1] += 1e-3


def _one(g: Tensor) -> None:
    g.numpy().reshape(-1)[5] *= 1.01


WAYS: list[Callable[[Tensor], object]] = [
    lambda g: g.mul_(2), lambda g: g.data.neg_(), lambda g: g.data.zero_(), _swap, _swap_rows, _last, _one,
    lambda g: g.data.fill_(torch.nan),
]  # fmt: skip


@pytest.mark.parametrize("shape", [(70, 130), (2, _ROW)], ids=str)
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_writing_is_noticed(way: int, shape: tuple[int, int]) -> None:
    g = torch.randn(shape)
    mark = Mark.of(g)
    assert mark.holds(g)
    WAYS[way](g)
    assert not mark.holds(g)


def test_others_are_not_it() -> None:
    g = torch.randn(70, 130)
    mark = Mark.of(g)
    assert not mark.holds(None)
    assert not mark.holds(g.clone())
    assert not Mark.of(g.T).holds(g.T)  # laid out otherwise: nobody looks
    nothing = torch.full((3,), torch.nan)
    assert not Mark.of(nothing).holds(nothing)


def test_small_ones_stand_for_themselves() -> None:
    for g in (torch.randn(()), torch.randn(0), torch.randn(5)):
        mark = Mark.of(g)
        assert mark.holds(g)
        if g.numel():
            g.data += 1e-3
            assert not mark.holds(g)

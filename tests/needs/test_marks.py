"""Whoever writes to a gradient between the backward pass and the step is noticed, whatever way it is done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from ocnopt import OCNOpt
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


def _small_ones(g: Tensor) -> None:
    g.data.view(-1)[1:] = 0


WAYS: list[Callable[[Tensor], object]] = [
    lambda g: g.mul_(2), lambda g: g.data.neg_(), lambda g: g.data.zero_(), _swap, _swap_rows, _last, _one,
    lambda g: g.data.fill_(torch.nan), _small_ones,
]  # fmt: skip


@pytest.mark.parametrize("shape", [(70, 130), (2, _ROW)], ids=str)
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_writing_is_noticed(way: int, shape: tuple[int, int]) -> None:
    g = torch.randn(shape)
    g[0, 0] = 1e12  # beside which others are nothing
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


@pytest.mark.parametrize("curvature", ["identity", "adaptive", "kronecker"])
@pytest.mark.parametrize("feedback", ["linear", "nonlinear"])
def test_who_touches_some_gradients_leaves_the_others_as_they_are(curvature: str, feedback: str) -> None:
    """A factor that is read off those says nothing of these: they move by their own gradients."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()
    x, found = torch.randn(6, 6).double(), []
    for quick in (True, False):
        model = copy.deepcopy(start)
        opt = OCNOpt(model.parameters(), 0.1, model=model, rank=3, curvature=curvature, feedback=feedback)
        model(x).square().mean().backward()
        for p in model[0].parameters():
            assert p.grad is not None
            p.grad.zero_()
        with nullcontext() if quick else patch("ocnopt.forms.nothing_else", lambda *_: False):
            opt.step()
        found.append([p.detach() for p in model[2].parameters()])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    assert (found[0][0] - start[2].weight).norm() > 1e-4

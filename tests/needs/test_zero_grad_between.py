"""Gradients that somebody throws away, by whatever name, take what was recorded with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.toys import SOME_GAMES, assert_identical, batches, mlp, name_of, state_of, train, values
from torch import nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt

games = pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)

Throw = Callable[[nn.Module, OCNOpt], None]


def fill_by_hand(model: nn.Module, opt: OCNOpt) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


WAYS: dict[str, Throw] = {
    "model.zero_grad()": lambda model, opt: model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda model, opt: model.zero_grad(set_to_none=False),
    "optimizer.zero_grad()": lambda model, opt: opt.zero_grad(),
    "optimizer.zero_grad(set_to_none=False)": lambda model, opt: opt.zero_grad(set_to_none=False),
    "by hand": fill_by_hand,
}
ways = pytest.mark.parametrize("way", WAYS)


@ways
@games
def test_between_two_backwards_of_one_graph(game: dict[str, Any], way: str) -> None:
    """Only the second loss counts, as it does for every optimizer."""
    runs = []
    for first in (True, False):
        model, (x, y) = mlp(), batches()[0]
        opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
        train(model, opt, batches(1, seed=4))
        opt.zero_grad()
        output = model(x)
        if first:
            (3 * output.square().mean()).backward(retain_graph=True)
            WAYS[way](model, opt)
        cross_entropy(output, y).backward()
        opt.step()
        runs.append((values(model), state_of(opt)))
    assert_identical(*runs)


@ways
@games
def test_between_two_passes(game: dict[str, Any], way: str) -> None:
    """A batch that is given up before its step (a loss that is not finite, say). The one that follows may have been
    taken for a second part of it when it began: then the step splits it into groups, and not the backward pass.
    """
    runs = []
    for first in (True, False):
        model, (x, y) = mlp(), batches()[0]
        opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
        train(model, opt, batches(1, seed=4))
        opt.zero_grad()
        if first:
            cross_entropy(model(batches(seed=9)[0][0]), y).backward()
            WAYS[way](model, opt)
        cross_entropy(model(x), y).backward()
        opt.step()
        runs.append((values(model), state_of(opt)))
    torch.testing.assert_close(*runs, rtol=1e-10, atol=1e-12)
    if game["rank"] == 1:
        assert_identical(*runs)


@games
def test_gradients_that_were_asked_for_by_hand_add_up(game: dict[str, Any]) -> None:
    """``torch.autograd.grad`` leaves ``p.grad`` alone: that there are none says nothing about what was recorded."""
    runs = []
    for together in (True, False):
        model, (x, y) = mlp(), batches()[0]
        opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
        params, output = list(model.parameters()), model(x)
        losses = [cross_entropy(output, y), output.square().mean()]
        losses = [losses[0] + losses[1]] if together else losses
        grads = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
        for p, *theirs in zip(params, *grads, strict=True):
            p.grad = torch.stack(theirs).sum(0)
        opt.step()
        runs.append(values(model))
    torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-12)

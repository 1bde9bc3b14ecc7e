"""A model that draws from Python's or numpy's generator: the second forward pass takes the same way as the first."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from tests.toys import CLASSES, FEATURES, SOME_GAMES, assert_identical, backward, batches, name_of, train, values
from torch import Tensor, nn

from ocnopt import OCNOpt

NONLINEAR = [g for g in SOME_GAMES if g["feedback"] == "nonlinear"]
sources = pytest.mark.parametrize("draw", [random.random, numpy.random.random], ids=["python", "numpy"])


class StochasticDepth(nn.Module):
    """Drops a block now and then, and says which way it went."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.draw, self.ways = draw, list[list[bool]]()
        self.first, self.head = nn.Linear(FEATURES, 6), nn.Linear(6, CLASSES)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(6)])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        way = [self.draw() < 0.5 for _ in self.blocks]
        self.ways.append(way)
        for block, kept in zip(self.blocks, way, strict=True):
            if kept:
                x = x + torch.tanh(block(x))
        return self.head(x)


def seed() -> None:
    random.seed(3)
    numpy.random.seed(3)


@sources
@pytest.mark.parametrize("state", ["live", "accumulated"])
@pytest.mark.parametrize("game", NONLINEAR, ids=name_of)
def test_takes_the_same_way_again(game: dict[str, Any], state: str, draw: Callable[[], float]) -> None:
    seed()
    model = StochasticDepth(draw)
    opt = OCNOpt(model.parameters(), 0.0, model=model, **game, state=state)
    for x, y in batches(4):
        opt.zero_grad()
        model.ways.clear()
        backward(model, x, y)
        opt.step()
        assert all(way == model.ways[0] for way in model.ways)
        assert len(model.ways) > 1 or state == "live", "the model ran again"
        assert opt.diagnostics.predicted_change == 0.0, "a step of nothing repeats the pass"


@sources
@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_the_stream_goes_on_as_without_the_optimizer(game: dict[str, Any], draw: Callable[[], float]) -> None:
    seed()
    model = StochasticDepth(draw)
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    train(model, opt, batches(3))
    after = draw()
    seed()
    alone = StochasticDepth(draw)
    for x, _ in batches(3):
        alone(x)
    assert after == draw()


@sources
def test_a_remeasured_loss_is_that_of_the_same_way(draw: Callable[[], float]) -> None:
    seed()
    model, (x, y) = StochasticDepth(draw), batches()[0]
    opt = OCNOpt(model.parameters(), 0.0, model=model)

    def closure() -> Tensor:
        opt.zero_grad()
        return backward(model, x, y)

    opt.step(closure)
    before = values(model)
    assert opt.diagnostics.actual_change == 0.0
    assert_identical(values(model), before)

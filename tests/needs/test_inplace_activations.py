"""Activations that overwrite the output of the layer before them change nothing about the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import CLASSES, FEATURES, GAMES, assert_identical, batches, name_of, train, values
from torch import Tensor, nn

from ocnopt import OCNOpt


class Residual(nn.Module):
    """``x += f(x)`` and activations in place, or the same without."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)
        self.act = nn.ReLU(inplace)

    def forward(self, x: Tensor) -> Tensor:
        out = self.outer(self.act(self.inner(x)))
        if self.inplace:
            out += x
            return out.relu_()
        return (out + x).relu()


class Shift(nn.Module):
    """Its input is not needed for the backward pass, so that somebody may overwrite it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Overwritten(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.inplace, self.shift = inplace, Shift()

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        y = self.shift(x)
        x = x.mul_(3) if self.inplace else x * 3
        return y.tanh() + x


def chain(inplace: bool) -> nn.Sequential:
    torch.manual_seed(0)
    leaky = nn.LeakyReLU(0.25, inplace)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.ReLU(inplace), nn.Linear(8, 8), leaky, nn.Linear(8, CLASSES)
    ).double()  # fmt: skip


def residual(inplace: bool) -> nn.Sequential:
    torch.manual_seed(0)
    body = [nn.Linear(FEATURES, 8), nn.ReLU(inplace), Residual(inplace), Residual(inplace), nn.Linear(8, CLASSES)]
    return nn.Sequential(*body).double()


def overwritten(inplace: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), Overwritten(inplace), nn.Linear(8, CLASSES)).double()


@pytest.mark.parametrize("make", [chain, residual], ids=lambda f: f.__name__)
@pytest.mark.parametrize("game", GAMES, ids=name_of)
def test_in_place_or_not(game: dict[str, Any], make: Any) -> None:
    runs = []
    for inplace in (False, True):
        model = make(inplace)
        opt = OCNOpt(model.parameters(), 0.3, model=model, **game)
        train(model, opt, batches(3))
        runs.append(values(model))
    assert_identical(*runs)


@pytest.mark.filterwarnings("ignore:.*no adapter is registered for Shift")
@pytest.mark.parametrize("rank", [1, 3])
def test_an_input_that_somebody_overwrites_later(rank: int) -> None:
    """What cannot be measured any more is predicted: the same to first order, and never nonsense."""
    runs = []
    for inplace in (False, True):
        model = overwritten(inplace)
        opt = OCNOpt(model.parameters(), 1e-4, model=model, feedback="nonlinear", rank=rank)
        train(model, opt, batches(1))
        runs.append([layer.s for layer in opt.diagnostics.layers])
    assert runs[1] == pytest.approx(runs[0], rel=0.02)


def test_an_output_that_the_loss_overwrites() -> None:
    """Logits masked in place after the model: the prediction of the change is about what the model said."""
    found = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
        opt = OCNOpt(model.parameters(), 1e-4, model=model, feedback="nonlinear")
        x, y = batches()[0]
        logits = model(x)
        mask = torch.zeros_like(logits, dtype=torch.bool)
        mask[:, -1] = y != CLASSES - 1
        logits = logits.masked_fill_(mask, -torch.inf) if inplace else logits.masked_fill(mask, -torch.inf)
        nn.functional.cross_entropy(logits, y).backward()
        opt.step()
        found.append(opt.diagnostics.predicted_change)
    assert found[1] == pytest.approx(found[0], rel=1e-2)

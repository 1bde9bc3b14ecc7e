"""The second forward pass draws the random numbers of the first, and the rest of the program never notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import (
    CLASSES,
    FEATURES,
    SOME_GAMES,
    assert_identical,
    backward,
    batches,
    name_of,
    on_every_call,
    train,
    values,
)
from torch import Tensor, nn

from ocnopt import OCNOpt

NONLINEAR = [g for g in SOME_GAMES if g["feedback"] == "nonlinear"]


class Noise(nn.Module):
    """Random numbers of another kind than a mask, behind a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.randn_like(x)


def noisy(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Tanh(), Noise(),
        nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES),
    ).double()  # fmt: skip


def outputs_of(model: nn.Module) -> list[Tensor]:
    """Everything that the model will say, in order."""
    said: list[Tensor] = []
    on_every_call(model, lambda out: said.append(out.detach().clone()))
    return said


@pytest.mark.filterwarnings("ignore:.*no adapter is registered for Noise")
@pytest.mark.parametrize("game", NONLINEAR, ids=name_of)
def test_a_step_of_nothing_repeats_the_pass_bit_for_bit(game: dict[str, Any]) -> None:
    model = noisy()
    said = outputs_of(model)
    opt = OCNOpt(model.parameters(), 0.0, model=model, **game)
    backward(model, *batches()[0])
    opt.step()
    assert len(said) == (2 if game["rank"] == 1 else 5), "three more to see which dimension is that of the samples"
    assert_identical(said[-1], said[0])
    assert opt.diagnostics.predicted_change == 0.0
    backward(model, *batches()[0])
    assert not torch.equal(said[-1], said[0]), "random it is"


@pytest.mark.filterwarnings("ignore:.*no adapter is registered for Noise")
@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_the_stream_of_random_numbers_is_that_of_a_run_without_the_optimizer(game: dict[str, Any]) -> None:
    streams = []
    for ours in (True, False):
        model = noisy()
        opt = OCNOpt(model.parameters(), model=model, **game) if ours else torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(3)
        train(model, opt, batches(3))
        streams.append(torch.get_rng_state())
        if ours:
            _ = opt.diagnostics, opt.summary()
            assert_identical(torch.get_rng_state(), streams[0])
    assert_identical(*streams)


@pytest.mark.filterwarnings("ignore:.*no adapter is registered for Noise")
@pytest.mark.parametrize("game", NONLINEAR, ids=name_of)
def test_masks_are_those_of_this_pass(game: dict[str, Any]) -> None:
    """Whatever is drawn between forward and step, the step is the same."""
    runs = []
    for disturb in (False, True):
        model = noisy()
        opt = OCNOpt(model.parameters(), model=model, **game)
        torch.manual_seed(11)
        opt.zero_grad()
        backward(model, *batches()[0])
        if disturb:
            torch.rand(100)
        opt.step()
        runs.append(values(model))
    assert_identical(*runs)


@pytest.mark.filterwarnings("ignore:.*no adapter is registered for Noise")
@pytest.mark.parametrize("game", NONLINEAR, ids=name_of)
def test_the_mode_is_that_of_this_pass(game: dict[str, Any]) -> None:
    """A model left in evaluation mode between forward and step is run again in training mode, and left alone."""
    runs = []
    for evaluated in (False, True):
        model = noisy()
        opt = OCNOpt(model.parameters(), 0.1, model=model, **game)
        torch.manual_seed(11)
        backward(model, *batches()[0])
        model.train(not evaluated)
        opt.step()
        assert all(m.training != evaluated for m in model.modules())
        runs.append(values(model))
    assert_identical(*runs)

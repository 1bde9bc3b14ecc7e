"""An input that is overwritten before the step: refused where the model has to run again, harmless elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import SOME_GAMES, assert_identical, backward, batches, mlp, name_of, train, values
from torch import Tensor, nn

from ocnopt import OCNOpt

LINEAR = [g for g in SOME_GAMES if g["feedback"] == "linear"]
NONLINEAR = [g for g in SOME_GAMES if g["feedback"] == "nonlinear"]


@pytest.mark.parametrize("how", ["in place", "next batch into the same tensor"])
@pytest.mark.parametrize("game", NONLINEAR, ids=name_of)
def test_a_second_pass_needs_the_input(game: dict[str, Any], how: str) -> None:
    model, (x, y) = mlp(), batches()[0]
    opt = OCNOpt(model.parameters(), model=model, **game)
    x = x.clone()
    backward(model, x, y)
    before = values(model)
    if how == "in place":
        x.mul_(2)
    else:
        x.copy_(batches(seed=9)[0][0])
    with pytest.raises(RuntimeError, match=r"feedback='nonlinear'.*its input was changed in place since"):
        opt.step()
    assert_identical(values(model), before)
    train(model, opt, batches(1))


def test_linear_feedback_of_rank_one_does_not_care() -> None:
    runs = []
    for overwrite in (False, True):
        model, (x, y) = mlp(), batches()[0]
        opt = OCNOpt(model.parameters(), model=model)
        x = x.clone()
        backward(model, x, y)
        if overwrite:
            x.zero_()
        opt.step()
        runs.append(values(model))
    assert_identical(*runs)


@pytest.mark.parametrize("game", LINEAR[1:], ids=name_of)
def test_the_layer_that_read_it_falls_back_loudly(game: dict[str, Any]) -> None:
    model, (x, y) = mlp(), batches()[0]
    opt = OCNOpt(model.parameters(), model=model, **game)
    x = x.clone()
    backward(model, x, y)
    x.zero_()
    with pytest.warns(UserWarning, match=r"^0\.0.*: its input was overwritten in place") as caught:
        opt.step()
    assert {str(w.message).split(".")[0] for w in caught} == {"0"}, "no other layer has read it"
    assert all(t.isfinite().all() for t in values(model))


def test_a_model_that_overwrites_its_own_input_is_refused_too() -> None:
    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x.div_(2))

    model, (x, y) = Greedy(), batches()[0]
    opt = OCNOpt(model.parameters(), model=model, feedback="nonlinear")
    backward(model, x, y)
    with pytest.raises(RuntimeError, match="changed in place"):
        opt.step()
    for game in LINEAR:  # what the layers have read is as they read it
        opt = OCNOpt(model.parameters(), model=model, **game)
        opt.zero_grad()
        backward(model, x.clone(), y)
        opt.step()
        opt.detach()


def test_other_tensors_may_change() -> None:
    model, (x, y) = mlp(), batches()[0]
    opt = OCNOpt(model.parameters(), model=model, feedback="nonlinear", rank=3)
    output = model(x)
    nn.functional.cross_entropy(output, y).backward()
    y.zero_()
    torch.set_rng_state(torch.get_rng_state())
    opt.step()

"""A step whose gradients did not come from the layers' calls: adaptive curvature for that step, said, no longer."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from tests.toys import assert_identical, batches, mlp, name_of, state_of, train, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from ocnopt import OCNOpt

GAMES: list[dict[str, Any]] = [
    {"bellman": "consistent"},
    {"bellman": "paper"},
    {"feedback": "off"},
    {"refresh_every": 2, "ekfac": False},
]
games = pytest.mark.parametrize("game", GAMES, ids=name_of)


def odd_step(model: nn.Module, opt: OCNOpt, x: Tensor, y: Tensor) -> list[str]:
    """The same function of the same weights, computed without the modules. Returns what the step warned of."""
    opt.zero_grad()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    for layer in layers[:-1]:
        x = torch.tanh(linear(x, layer.weight, layer.bias))
    cross_entropy(linear(x, layers[-1].weight, layers[-1].bias), y).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    return [str(w.message) for w in caught]


def factors(opt: OCNOpt) -> list[Tensor]:
    return [s["input_factor"] for s in state_of(opt) if "input_factor" in s]


@games
def test_kronecker_comes_back(game: dict[str, Any]) -> None:
    model, data = mlp(), batches(4)
    opt = OCNOpt(model.parameters(), 0.05, model=model, curvature="kronecker", **game)
    train(model, opt, data[:1])
    plain, before = opt.summary(), factors(opt)
    said = odd_step(model, opt, *data[1])
    assert said == [f"{n}: its calls were not seen; its curvature is adaptive" for n in ("0.0", "1.0", "2")]
    assert opt.summary().count("its calls were not seen: adaptive curvature") == 3
    assert_identical(factors(opt), before)
    train(model, opt, data[2:3])  # any warning is a failure
    assert opt.summary() == plain
    assert all(not torch.equal(a, b) for a, b in zip(factors(opt), before, strict=True))
    assert [int(s["statistics"]) for s in state_of(opt) if "statistics" in s] == [2, 2, 2]


@games
def test_an_odd_step_at_the_very_beginning(game: dict[str, Any]) -> None:
    model, data = mlp(), batches(2)
    opt = OCNOpt(model.parameters(), 0.05, model=model, curvature="kronecker", **game)
    said = odd_step(model, opt, *data[0])
    assert len(said) == 3 + (game.get("bellman") == "paper"), "nor has the order of the calls"
    assert not factors(opt)
    train(model, opt, data[1:])
    assert len(factors(opt)) == 3


@games
def test_it_is_a_step_with_adaptive_curvature(game: dict[str, Any]) -> None:
    model, (x, y) = mlp(), batches()[0]
    opt = OCNOpt(model.parameters(), 0.05, model=model, curvature="kronecker", **game)
    odd_step(model, opt, x, y)
    other = mlp()
    adaptive = OCNOpt(other.parameters(), 0.05, model=other, curvature="adaptive", **game)
    odd_step(other, adaptive, x, y)
    torch.testing.assert_close(values(model), values(other))


@games
@pytest.mark.parametrize("odd_again", [False, True])
def test_goes_on_as_a_fresh_optimizer_does(game: dict[str, Any], odd_again: bool) -> None:
    model, data = mlp(), batches(8)
    opt = OCNOpt(model.parameters(), 0.05, model=model, curvature="kronecker", **game)
    train(model, opt, data[:2])
    odd_step(model, opt, *data[2])
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    fresh = OCNOpt(twin.parameters(), 0.05, model=twin, curvature="kronecker", **game)
    fresh.load_state_dict(copy.deepcopy(opt.state_dict()))
    for each, its in ((model, opt), (twin, fresh)):
        train(each, its, data[3:5])
        if odd_again:
            odd_step(each, its, *data[5])
        train(each, its, data[6:])
    assert_identical(values(model), values(twin))
    assert_identical(state_of(opt), state_of(fresh))

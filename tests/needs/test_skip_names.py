"""The warning about skipped steps names the layer that was bad, whoever plays by the time somebody asks."""

from __future__ import annotations

from typing import Any

import pytest
from tests.toys import SOME_GAMES, backward, batches, mlp, name_of
from torch import nn

from ocnopt import OCNOpt

NAN = float("nan")
games = pytest.mark.parametrize("game", [*SOME_GAMES, {"feedback": "off"}], ids=name_of)


def layers(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


def bad_step(model: nn.Module, opt: OCNOpt, layer: int) -> None:
    opt.zero_grad()
    backward(model, *batches()[0])
    layers(model)[layer].weight.grad[0, 0] = NAN
    opt.step()


def step_of_few(model: nn.Module, opt: OCNOpt, chosen: list[int]) -> None:
    """A step in which only some layers have gradients."""
    opt.zero_grad()
    backward(model, *batches()[0])
    for i, layer in enumerate(layers(model)):
        if i not in chosen:
            layer.weight.grad = layer.bias.grad = None
    opt.step()


def said(opt: OCNOpt) -> str:
    with pytest.warns(UserWarning, match="skipped") as caught:
        _ = opt.diagnostics
    (warning,) = caught
    return str(warning.message)


@games
@pytest.mark.parametrize("later", [[0], [1], [2], [0, 1]])
@pytest.mark.parametrize(("bad", "name"), [(0, "0.0"), (2, "2")])
def test_fewer_players_later(bad: int, name: str, later: list[int], game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, **game)
    bad_step(model, opt, bad)
    step_of_few(model, opt, later)
    assert f"1 step(s) skipped: the gradient of '{name}" in said(opt)


@games
def test_fewer_players_before(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, **game)
    step_of_few(model, opt, [2])
    bad_step(model, opt, 1)
    assert "1 step(s) skipped: the gradient of '1.0" in said(opt)


@games
def test_the_last_bad_step_is_the_one_that_is_told_of(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, **game)
    bad_step(model, opt, 0)
    step_of_few(model, opt, [1])
    bad_step(model, opt, 2)
    step_of_few(model, opt, [0])
    assert "2 step(s) skipped: the gradient of '2" in said(opt)
    assert opt.diagnostics.skipped_steps == 2

"""What a step says about itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import GAMES, SOME_GAMES, assert_identical, backward, batches, mlp, name_of, train, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import Diagnostics, OCNOpt

MOMENTA = {
    "plain": {"momentum": 0.0},
    "ema": {"momentum": 0.9},
    "heavy ball": {"momentum": 0.9, "ema": False, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.8, "ema": False, "nesterov": True},
    "decoupled": {"weight_decay": 0.5, "decoupled_weight_decay": True},
    "maximize": {"momentum": 0.5, "weight_decay": 0.1, "maximize": True},
}


def test_before_the_first_step() -> None:
    found = OCNOpt(mlp().parameters()).diagnostics
    assert isinstance(found, Diagnostics)
    assert found.layers == []
    assert found.predicted_change is None
    assert found.actual_change is None
    assert found.skipped_steps == 0
    assert "layer" in str(found)


def test_without_feedback_there_is_no_game_to_tell_of() -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), feedback="off")
    train(model, opt, batches(2))
    assert opt.diagnostics.layers == []
    assert opt.diagnostics.predicted_change is None


@pytest.mark.parametrize("game", GAMES, ids=name_of)
def test_layer_reports(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.5, model=model, **game)
    train(model, opt, batches(2))
    found = opt.diagnostics
    assert [layer.name for layer in found.layers] == ["0.0", "1.0", "2"]
    assert all(layer.trace > 0 for layer in found.layers)
    assert all(0 <= layer.w_min <= layer.w_max <= 1 for layer in found.layers)
    assert found.layers[0].s == 0
    assert all(layer.s != 0 for layer in found.layers[1:])
    text = str(found).splitlines()
    assert len(text) == 2 + 3
    assert text[0].split() == ["layer", "trace", "K", "w", "s", "clamped", "projected"]
    if game["rank"] == 1 or (game["feedback"] == "linear" and game["bellman"] == "consistent"):
        spread = {(layer.w_min, layer.w_max) for layer in found.layers}
        assert len(spread) == 1 or game["rank"] == 1
    if game["bellman"] == "consistent":
        assert all(layer.projections == 0 for layer in found.layers)


def test_clamps_are_counted() -> None:
    """Momentum that runs against the gradient asks for w > 1."""
    clamped, largest = {}, {}
    for clamp in (True, False):
        model = mlp()
        opt = OCNOpt(model.parameters(), 1.0, curvature="identity", clamp=clamp)
        layers = []
        for batch in batches(12):
            train(model, opt, [batch])
            layers += opt.diagnostics.layers
        clamped[clamp] = sum(layer.clamped for layer in layers)
        largest[clamp] = max(layer.w_max for layer in layers)
    assert clamped[True] > 0
    assert largest[True] == 1
    assert clamped[False] == 0
    assert largest[False] > 1


def test_projections_are_counted() -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, bellman="paper", curvature="identity", gauss_newton=30.0)
    train(model, opt, batches(1))
    assert sum(layer.projections for layer in opt.diagnostics.layers) > 0


@pytest.mark.parametrize("options", MOMENTA.values(), ids=list(MOMENTA))
@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_the_predicted_change_is_that_of_the_loss(game: dict[str, Any], options: dict[str, Any]) -> None:
    """For a tiny learning rate the first-order prediction is the change, for every kind of momentum."""
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.03, model=model, **game, **options)
    (x, y), *more = batches(4)
    train(model, opt, more)
    for group in opt.param_groups:
        group["lr"] = 1e-6
    opt.zero_grad()
    before = backward(model, x, y).item()
    opt.step()
    with torch.no_grad():
        change = cross_entropy(model(x), y).item() - before
    assert change != 0
    assert opt.diagnostics.predicted_change == pytest.approx(change, rel=2e-3)


@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_the_sum_of_s_is_the_way_to_the_prediction(game: dict[str, Any]) -> None:
    """s of a layer is what the layers before have done; without momentum the last one has the rest to add."""
    model = mlp()
    opt = OCNOpt(model.parameters(), 1e-5, model=model, momentum=0.0, **game)
    train(model, opt, batches(1))
    found = opt.diagnostics
    s = [layer.s for layer in found.layers]
    assert 0 > s[1] > s[2] > found.predicted_change


class Noisy(nn.Module):
    """Draws random numbers, has buffers and a parameter that the optimizer does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(3, 3).double()
        self.norm, self.drop = nn.BatchNorm1d(3).double(), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.body(x))))


@pytest.mark.parametrize("returns", ["tensor", "float"])
@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_actual_change(game: dict[str, Any], returns: str) -> None:
    torch.manual_seed(0)
    model, (x, y) = Noisy(), batches()[0]
    opt = OCNOpt([*model.body.parameters(), *model.norm.parameters()], 1e-6, model=model, **game)
    calls = []

    def closure() -> Any:
        calls.append(1)
        opt.zero_grad()
        loss = backward(model, x, y)
        return loss if returns == "tensor" else loss.item()

    torch.manual_seed(5)
    opt.step(closure)
    assert len(calls) == 1
    grads = [p.grad for p in model.parameters()]
    kept, buffers, rng = [g.clone() for g in grads], values(model), torch.get_rng_state()
    change = opt.diagnostics.actual_change
    assert len(calls) == 2
    assert change == pytest.approx(opt.diagnostics.predicted_change, rel=1e-2)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True)), "the very same tensors"
    assert_identical(grads, kept)
    assert_identical(values(model), buffers)
    assert_identical(torch.get_rng_state(), rng)
    assert opt.diagnostics.actual_change == change
    assert len(calls) == 2, "measured once"


def test_actual_change_leaves_gradients_that_are_zeroed_in_place() -> None:
    model, (x, y) = mlp(), batches()[0]
    opt = OCNOpt(model.parameters())

    def closure() -> Tensor:
        opt.zero_grad(set_to_none=False)
        return backward(model, x, y)

    opt.step(closure)
    kept = [p.grad.clone() for p in model.parameters()]
    assert opt.diagnostics.actual_change is not None
    assert_identical([p.grad for p in model.parameters()], kept)


def test_actual_change_must_be_read_before_the_next_step() -> None:
    model, (x, y) = mlp(), batches()[0]
    opt = OCNOpt(model.parameters())

    def closure() -> Tensor:
        opt.zero_grad()
        return backward(model, x, y)

    opt.step(closure)
    found = opt.diagnostics
    opt.step(closure)
    with pytest.raises(RuntimeError, match="actual_change must be read before the next step"):
        _ = found.actual_change
    assert opt.diagnostics.actual_change is not None


def test_there_is_none_without_a_closure() -> None:
    model = mlp()
    opt = OCNOpt(model.parameters())
    train(model, opt, batches(1))
    assert opt.diagnostics.actual_change is None

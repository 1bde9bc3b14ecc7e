"""Hyper-parameters are read at every step: what may change on the way, and what the statistics make of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import assert_identical, batches, mlp, state_of, train, values

from ocnopt import OCNOpt


def test_a_second_moment_that_starts_late_is_right_at_once() -> None:
    """The first adaptive step has the length of the learning rate, however many other steps went before."""
    model = mlp()
    opt = OCNOpt(model.parameters(), 1e-3, curvature="identity", momentum=0.0, feedback="off", decay=0.999)
    train(model, opt, batches(20))
    opt.param_groups[0]["curvature"] = "adaptive"
    before = values(model)
    train(model, opt, batches(1))
    for p, q in zip(values(model), before, strict=True):
        torch.testing.assert_close((p - q).abs(), torch.full_like(p, 1e-3), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("how", ["curvature", "bias"])
def test_factors_that_start_late_are_their_first_statistic(how: str) -> None:
    model = mlp(depth=2)
    start = "adaptive" if how == "curvature" else "kronecker"
    opt = OCNOpt(model.parameters(), 0.0, model=model, curvature=start, feedback="off")
    train(model, opt, batches(5))
    if how == "curvature":
        opt.param_groups[0]["curvature"] = "kronecker"
        with pytest.raises(RuntimeError, match="after the forward pass"):
            train(model, opt, batches(1))
    else:
        for layer in (model[0][0], model[1]):  # the block loses its column of ones
            layer.bias.requires_grad_(False)
    train(model, opt, batches(1, seed=9))
    fresh_model = mlp(depth=2)
    if how == "bias":
        for layer in (fresh_model[0][0], fresh_model[1]):
            layer.bias.requires_grad_(False)
    fresh = OCNOpt(fresh_model.parameters(), 0.0, model=fresh_model, curvature="kronecker", feedback="off")
    train(fresh_model, fresh, batches(1, seed=9))
    for late, new in zip(state_of(opt), state_of(fresh), strict=True):
        if "input_factor" in new:
            for key in ("input_factor", "output_factor", "eigenvalues"):
                torch.testing.assert_close(late[key], new[key])


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.5},
        {"feedback": "nonlinear"},
        {"rank": 2},
        {"bellman": "paper"},
        {"momentum": 0.0},
        {"gauss_newton": 3.0},
        {"weight_decay": 0.5},
        {"curvature": "identity"},
        {"ema": False},
    ],
    ids=str,
)
def test_a_change_takes_effect_at_the_next_step(change: dict[str, Any]) -> None:
    runs = []
    for changed in (False, True):
        model = mlp()
        opt = OCNOpt(model.parameters(), 0.1, model=model, rank=3)  # hooked from the start
        train(model, opt, batches(2))
        if changed:
            opt.param_groups[0].update(change)
        train(model, opt, batches(1, seed=9))
        runs.append(values(model)[-1])
    assert not torch.allclose(*runs, rtol=1e-7)


def test_a_value_that_is_set_to_itself_changes_nothing() -> None:
    runs = []
    for again in (False, True):
        model = mlp()
        opt = OCNOpt(model.parameters(), 0.1, model=model, rank=3)
        train(model, opt, batches(2))
        if again:
            opt.param_groups[0].update(dict(opt.param_groups[0]))
        train(model, opt, batches(2))
        runs.append(values(model))
    assert_identical(*runs)

"""Hyper-parameters are read at every step: what may change on the way, and what the statistics make of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.toys import assert_identical, batches, mlp, state_of, train, values
from torch import nn

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


# --- what is worked out once is worked out again after a change ---


def trained(**options: Any) -> tuple[nn.Sequential, OCNOpt]:
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.1, model=model, **options)
    train(model, opt, batches(2))
    return model, opt


@pytest.mark.parametrize(
    ("name", "value"),
    [("clamp", 1), ("momentum", 1.5), ("lr", -1.0), ("rank", True), ("alignment", {"0": -1}), ("curvature", "none")],
)
def test_a_bad_value_is_found_after_good_steps(name: str, value: Any) -> None:
    """Also one that equals a good one."""
    model, opt = trained()
    train(model, opt, batches(1))
    opt.param_groups[0][name] = value
    before = values(model)
    with pytest.raises(ValueError, match=name):
        opt.step()
    assert_identical(values(model), before)


def test_a_learning_rate_that_is_changed_in_place() -> None:
    model, opt = trained()
    opt.param_groups[0]["lr"] = lr = torch.tensor(0.1)
    train(model, opt, batches(2))
    lr.fill_(-1)
    with pytest.raises(ValueError, match="lr"):
        opt.step()
    lr.fill_(0)
    before = values(model)
    train(model, opt, batches(1))
    assert_identical(values(model), before)


def test_rules_that_are_changed_in_place() -> None:
    _, opt = trained(alignment={"": "first"}, feedback="nonlinear")
    opt.param_groups[0]["alignment"][""] = -1
    with pytest.raises(ValueError, match="alignment"):
        opt.step()


def test_another_parameter_in_the_place_of_one() -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.1)
    train(model, opt, batches(2))
    old = model[2].bias
    model[2].bias = new = nn.Parameter(old.detach().clone())
    opt.param_groups[0]["params"][-1] = new
    train(model, opt, batches(1))
    assert not torch.equal(new, old)
    assert opt.state[new]["step"] == 1


@pytest.mark.parametrize("feedback", ["off", "linear", "nonlinear"])
@pytest.mark.parametrize("lost", ["all", "of one", "momentum"])
def test_state_that_somebody_takes_away(lost: str, feedback: str) -> None:
    """It starts anew, and the rest goes on."""
    runs = []
    for copied in (False, True):
        model, opt = trained(feedback=feedback)
        first = model[0][0].weight
        if lost == "all":
            opt.state.clear()
        elif lost == "of one":
            del opt.state[first]
        else:
            del opt.state[first]["momentum"]
        if copied:  # which has nothing to remember
            opt = copy.deepcopy(opt)
            model = mlp_of(model, opt)
        train(model, opt, batches(2))
        runs.append((values(model), state_of(opt)))
    assert_identical(*runs)


def mlp_of(model: nn.Sequential, opt: OCNOpt) -> nn.Sequential:
    """A copy of a network with the parameters of an optimizer, to which it is attached."""
    twin = copy.deepcopy(model)
    for (name, _), p in zip(model.named_parameters(), opt.param_groups[0]["params"], strict=True):
        path, _, own = name.rpartition(".")
        setattr(twin.get_submodule(path), own, p)
    opt.attach(twin)
    return twin


def test_parameters_of_another_precision() -> None:
    model, opt = trained()
    model.float()
    for state in opt.state.values():
        state.update({key: value.float() for key, value in state.items() if key != "step"})
    train(model, opt, batches(1, dtype=torch.float32))
    twin, its = trained()
    train(twin, its, batches(1))
    torch.testing.assert_close(values(model), [p.float() for p in values(twin)])


def test_gradients_that_come_and_go() -> None:
    """Each parameter counts its own steps."""
    model, opt = trained()
    for absent in ({0, 1}, {4}, set(), {0, 1}):
        opt.zero_grad()
        nn.functional.cross_entropy(model(batches()[0][0]), batches()[0][1]).backward()
        for i in absent:
            list(model.parameters())[i].grad = None
        opt.step()
    assert [int(opt.state[p]["step"]) for p in model.parameters()] == [4, 4, 6, 6, 5, 6]

"""Wrong values are refused by name; the whole game has one value for all groups; what needs the model says so."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.toys import backward, batches, mlp, values
from torch import nn

from ocnopt import OCNOpt

NAN, INF = float("nan"), float("inf")

WRONG: dict[str, list[Any]] = {
    "lr": [-1.0, NAN, INF, "fast", None, True, torch.ones(2), torch.tensor(-1.0), torch.tensor(NAN)],
    "curvature": ["newton", None, 3, "Identity"],
    "feedback": ["on", None, True],
    "rank": [0, -1, 1.5, "all", None, True],
    "gauss_newton": [0.0, -1.0, NAN, INF, "1", None, True],
    "bellman": ["Paper", None, 1],
    "clamp": [1, None, "yes"],
    "game": ["coop", None, 1],
    "alignment": ["middle", -1, 1.5, None, True, {"a": "middle"}, {1: "first"}],
    "state": ["dead", None, 1],
    "players": [0, 1.5, None, True],
    "momentum": [-0.1, 1.0, NAN, None, "0.9"],
    "ema": [1, None],
    "nesterov": [0, None],
    "weight_decay": [-0.1, NAN, INF, None],
    "decoupled_weight_decay": [1, None],
    "maximize": [1, None],
    "decay": [-0.1, 1.0, NAN, None],
    "eps": [-1e-8, NAN, INF, None],
    "bias_correction": [1, None],
    "damping": [-1e-3, NAN, INF, None],
    "factor_decay": [-0.1, 1.0, NAN, None],
    "factor_every": [0, 1.5, None, True],
    "accumulate": [0, 1.5, None, True],
    "refresh_every": [0, 1.5, None, True],
    "ekfac": [1, None],
    "fused": [0, "yes", 1.0],
    "graphed": [0, "yes", 1.0],
}
CASES = [(name, value) for name, wrong in WRONG.items() for value in wrong]


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(("name", "value"), CASES, ids=[f"{n}={v}" for n, v in CASES])
def test_a_wrong_value_is_named_and_shown(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} .*{re.escape(repr(value))}"):
        OCNOpt([parameter()], **{name: value})


def test_every_argument_is_checked() -> None:
    opt = OCNOpt([parameter()])
    assert set(WRONG) == set(opt.defaults)


@pytest.mark.parametrize(("name", "value"), CASES[::3], ids=[f"{n}={v}" for n, v in CASES[::3]])
def test_also_in_a_group_and_when_changed_later(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} .*{re.escape(repr(value))}"):
        OCNOpt([{"params": [parameter()], name: value}])
    model = mlp()
    opt = OCNOpt(model.parameters())
    backward(model, *batches()[0])
    opt.param_groups[0][name] = value
    before = values(model)
    with pytest.raises(ValueError, match=rf"^{name} .*{re.escape(repr(value))}"):
        opt.step()
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"nesterov": True}, {"nesterov": True, "ema": False, "momentum": 0.0}])
def test_nesterov_is_heavy_ball(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"nesterov=True .* ema=(True|False), momentum="):
        OCNOpt([parameter()], **options)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("feedback", "linear", "off"),
        ("rank", 1, 2),
        ("gauss_newton", 1.0, 0.5),
        ("bellman", "consistent", "paper"),
        ("clamp", True, False),
        ("maximize", False, True),
    ],
)
def test_the_whole_game_has_one_value(name: str, one: Any, other: Any) -> None:
    a, b = parameter(), parameter()
    with pytest.raises(ValueError, match=f"{name} belongs to the whole game.*{one!r} and {other!r}"):
        OCNOpt([{"params": [a]}, {"params": [b], name: other}], **{name: one})


def test_other_arguments_may_differ() -> None:
    a, b = parameter(), parameter()
    other = {"lr": 0.5, "curvature": "identity", "momentum": 0.5, "ema": False, "weight_decay": 0.1, "decay": 0.5}
    OCNOpt([{"params": [a]}, {"params": [b], **other}])


NEEDY = [{"rank": 2}, {"rank": "full"}, {"curvature": "kronecker"}, {"feedback": "nonlinear"}]
ids = [next(iter(o.values())) for o in NEEDY]


@pytest.mark.parametrize("options", NEEDY, ids=ids)
def test_what_needs_the_model_says_so(options: dict[str, Any]) -> None:
    (name, value), model = next(iter(options.items())), mlp()
    said = re.escape(f"{name}={value!r}") + ".*model=..."
    with pytest.raises(ValueError, match=said):
        OCNOpt(model.parameters(), **options)
    if name == "curvature":
        with pytest.raises(ValueError, match=said):
            OCNOpt([{"params": list(model.parameters()), **options}])


@pytest.mark.parametrize("options", NEEDY, ids=ids)
def test_after_detach_the_step_says_so(options: dict[str, Any]) -> None:
    (name, value), model = next(iter(options.items())), mlp()
    opt = OCNOpt(model.parameters(), model=model, **options)
    opt.detach()
    backward(model, *batches()[0])
    before = values(model)
    with pytest.raises(RuntimeError, match=re.escape(f"{name}={value!r}") + r".*attach\(model\)"):
        opt.step()
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)


def test_rank_needs_no_model_without_feedback() -> None:
    OCNOpt([parameter()], rank=4, feedback="off")


@pytest.mark.parametrize("options", NEEDY, ids=ids)
def test_asked_for_after_the_forward_pass(options: dict[str, Any]) -> None:
    """A group may be changed at any time; what was not recorded must be run again."""
    (name, value), model = next(iter(options.items())), mlp()
    opt = OCNOpt(model.parameters(), model=model)
    backward(model, *batches()[0])
    opt.param_groups[0][name] = value
    with pytest.raises(RuntimeError, match=f"{name}=.*after the forward pass"):
        opt.step()
    opt.zero_grad()
    backward(model, *batches()[0])
    opt.step()


@pytest.mark.parametrize("model", [3, nn.Linear, None], ids=str)
def test_model_must_be_a_module(model: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got"):
        OCNOpt([parameter()]).attach(model)


def test_model_must_hold_the_parameters() -> None:
    with pytest.raises(ValueError, match="model holds none of the parameters"):
        OCNOpt([parameter()], model=mlp())


def test_no_parameters() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        OCNOpt([])

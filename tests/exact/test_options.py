"""Clamp, order of the parameters, maximize and parameter groups, against the dense solver or against each other."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.exact.compare import assert_close, assert_same_step, check, engine_step, optimizer, stagewise
from tests.exact.dense import Dense, fraction
from tests.exact.nets import Net, loss, make
from torch import Tensor

from ocnopt.bellman import Consistent

FEEDBACK = ["nonlinear", "linear"]
LIVELY: dict[str, Any] = {"curvature": "adaptive", "lr": 0.3, "eps": 1e-2, "rank": "full", "weight_decay": 0.01}


def assert_same_steps(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, step in expected.items():
        assert_close(actual[name], step, f"δθ of {name}")


# --- clamp ---


@pytest.mark.parametrize("feedback", FEEDBACK)
def test_clamp_moves_the_weights_and_nothing_else(feedback: str) -> None:
    options = LIVELY | {"feedback": feedback, "lr": 1.0, "momentum": 0.8, "ema": False}
    net, twin = make("convolution"), make("convolution")
    opt, free = optimizer(net, **options), optimizer(twin, **options)
    dense = Dense(net, opt)
    for batch in net.batches[:2]:  # momentum that overshoots
        engine_step(net.model, opt, batch)
        engine_step(twin.model, free, batch)
        dense.step(batch)
    opt.param_groups[0]["clamp"] = True
    actual = stagewise(net, engine_step(net.model, opt, net.batches[2]))
    engine_step(twin.model, free, net.batches[2])
    clamped, unbounded = opt.diagnostics, free.diagnostics
    for diagnostics in (clamped, unbounded):
        assert isinstance(diagnostics.policy, Consistent)
    assert torch.equal(clamped.policy.J, unbounded.policy.J)
    assert torch.equal(clamped.policy.b, unbounded.policy.b)
    assert float(unbounded.w.min()) < 0
    assert float(unbounded.w.max()) > 1
    assert torch.equal(clamped.w, clamped.asked.clamp(0, 1))
    asked = torch.linalg.solve(clamped.policy.J, clamped.policy.b + clamped.s)
    if feedback == "linear":  # one answer for all stages, given before any is moved
        asked = torch.linalg.solve(clamped.policy.J[0], clamped.policy.b[0]).expand_as(clamped.asked)
    assert_close(clamped.asked, asked, "w before clamping")
    assert_close(unbounded.asked[0], clamped.asked[0], "w of the first stage before clamping")
    e = dense.step(net.batches[2])
    phi = fraction(dense.game, 3)
    quantities = zip(e.M, e.G, clamped.w, e.cost, strict=True)
    e.dtheta = [-phi * torch.linalg.solve(M, G @ w + l) for M, G, w, l in quantities]
    assert_same_step(dense, actual, e)


# --- order of the parameters ---


def shuffled(net: Net, seed: int) -> list[dict[str, Any]]:
    """The parameters in groups of one or two, in any order."""
    params = list(net.model.parameters())
    random.Random(seed).shuffle(params)
    return [{"params": params[i : i + 2]} for i in range(0, len(params), 2)]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {"feedback": "nonlinear", "rank": 3},
        {"feedback": "linear", "rank": "full"},
        {"feedback": "linear", "rank": 1, "model": None},
        {"feedback": "nonlinear", "rank": 3, "bellman": "paper"},
        {"feedback": "nonlinear", "rank": 1, "curvature": "kronecker", "damping": 0.1},
    ],
)
def test_order_of_the_parameters_does_not_matter(options: dict[str, Any], seed: int) -> None:
    net, twin = make("mixed"), make("mixed")
    options = LIVELY | {"momentum": 0.5} | options
    opt, other = optimizer(net, **options), optimizer(twin, shuffled(twin, seed), **options)
    for batch in net.batches:
        assert_same_steps(engine_step(twin.model, other, batch), engine_step(net.model, opt, batch))


# --- maximize ---


@pytest.mark.parametrize("curvature", ["identity", "adaptive", "kronecker"])
@pytest.mark.parametrize("feedback", FEEDBACK)
@pytest.mark.parametrize("bellman", ["consistent", "paper"])
@pytest.mark.parametrize("rank", [1, 3])
def test_maximize_is_minimising_the_negated_loss(rank: int, bellman: str, feedback: str, curvature: str) -> None:
    net, twin = make("convolution"), make("convolution")
    options = LIVELY | {"rank": rank, "bellman": bellman, "feedback": feedback, "curvature": curvature}
    options |= {"momentum": 0.5, "damping": 0.1}
    opt, other = optimizer(net, maximize=True, **options), optimizer(twin, **options)
    for X, targets in net.batches:
        up = engine_step(net.model, opt, (X, targets))
        before = {n: p.detach().clone() for n, p in twin.model.named_parameters()}
        other.zero_grad()
        (-loss(twin.model(X), targets)).backward()
        other.step()
        assert_same_steps(up, {n: p.detach() - before[n] for n, p in twin.model.named_parameters()})
        assert_close(opt.diagnostics.w, other.diagnostics.w, "w")


# --- parameter groups ---


def by_name(net: Net, *rules: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups: each parameter goes to the first rule whose text is part of its name."""
    groups: list[dict[str, Any]] = [{"params": [], **options} for _, options in rules]
    for name, p in net.model.named_parameters():
        next(g for (text, _), g in zip(rules, groups, strict=True) if text in name)["params"].append(p)
    return [group for group in groups if group["params"]]


SGD = {"curvature": "identity", "lr": 1.0, "momentum": 0.6, "ema": False, "nesterov": True, "weight_decay": 0.05}
ADAM = {"curvature": "adaptive", "lr": 0.05, "momentum": 0.7, "decay": 0.8, "eps": 1e-2}
KFAC = {"curvature": "kronecker", "lr": 0.2, "damping": 0.1, "momentum": 0.3}
RULES: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "learning rates": [("0.", {"lr": 0.1, "curvature": "identity"}), ("", {"lr": 1.0, "curvature": "identity"})],
    "biases apart": [("bias", ADAM), ("", SGD)],
    "biases of a Kronecker block without decay": [
        ("bias", KFAC | {"weight_decay": 0.0}),
        ("", KFAC | {"weight_decay": 0.05}),
    ],
    "biases that leave the Kronecker block": [("bias", KFAC | {"lr": 0.1}), ("", KFAC)],
    "everything": [
        ("0.0.weight", SGD),
        ("0.0.bias", ADAM | {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        ("2.bias", KFAC | {"weight_decay": 0.0}),
        ("2.", KFAC | {"weight_decay": 0.02}),
        ("", ADAM | {"weight_decay": 0.01, "bias_correction": False}),
    ],
}


@pytest.mark.parametrize("feedback", FEEDBACK)
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("rules", RULES)
def test_parameter_groups(rules: str, rank: int, feedback: str) -> None:
    net = make("convolution")
    check(net, optimizer(net, by_name(net, *RULES[rules]), rank=rank, feedback=feedback))


@pytest.mark.parametrize("feedback", FEEDBACK)
def test_parameter_groups_in_paper_mode(feedback: str) -> None:
    net = make("convolution")
    rules = [*RULES["biases apart"][:1], ("2.", KFAC), ("", SGD)]
    check(net, optimizer(net, by_name(net, *rules), rank=3, feedback=feedback, bellman="paper"))

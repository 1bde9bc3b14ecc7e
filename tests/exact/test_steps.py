"""Steps of OCNOpt equal those of the dense solver: every δθ, V_x, V_xx and J, to 1e-9."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.exact.compare import assert_close, assert_same_step, check, engine_step, optimizer, stagewise
from tests.exact.dense import Dense, fraction
from tests.exact.nets import NETS, RANKS, loss, make, rank_of

from ocnopt.reference import gauss_newton_step, grouped_cost

MOMENTUM: dict[str, dict[str, Any]] = {
    "heavy ball": {"momentum": 0.6, "ema": False},
    "nesterov": {"momentum": 0.6, "ema": False, "nesterov": True},
    "average": {"momentum": 0.6, "ema": True, "bias_correction": False},
    "corrected average": {"momentum": 0.6, "ema": True, "bias_correction": True},
}
METRICS: dict[str, dict[str, Any]] = {
    "identity": {"curvature": "identity", "lr": 0.8},
    "rmsprop": {"curvature": "adaptive", "lr": 0.1, "decay": 0.8, "eps": 1e-2, "bias_correction": False},
    "adam": {"curvature": "adaptive", "lr": 0.1, "decay": 0.8, "eps": 1e-2},
    "kfac": {"curvature": "kronecker", "lr": 0.3, "damping": 0.1, "factor_decay": 0.7, "ekfac": False},
    "ekfac": {"curvature": "kronecker", "lr": 0.3, "damping": 0.1, "factor_decay": 0.7},
    "ekfac, refreshed": {"curvature": "kronecker", "lr": 0.3, "damping": 0.1, "factor_decay": 0.7, "refresh_every": 2},
}


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", NETS)
def test_every_kind_of_layer(name: str, rank: int | str, decay: float) -> None:
    net = make(name)
    check(net, optimizer(net, feedback="nonlinear", rank=rank, weight_decay=decay, **METRICS["identity"]), steps=1)


@pytest.mark.parametrize("feedback", ["nonlinear", "linear"])
@pytest.mark.parametrize("bellman", ["consistent", "paper"])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("momentum", MOMENTUM)
def test_momentum_at_the_third_step(momentum: str, rank: int, bellman: str, feedback: str) -> None:
    net = make("mlp" if rank == 1 else "convolution")
    options = METRICS["identity"] | MOMENTUM[momentum]
    check(net, optimizer(net, feedback=feedback, rank=rank, bellman=bellman, weight_decay=0.01, **options))


@pytest.mark.parametrize("feedback", ["nonlinear", "linear"])
@pytest.mark.parametrize("bellman", ["consistent", "paper"])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("name", "rank"), [("mlp", 1), ("convolution", 3), ("norms", 1), ("mixed", 3), ("words", "full")]
)
def test_metrics_at_the_third_step(name: str, rank: int | str, metric: str, bellman: str, feedback: str) -> None:
    net = make(name)
    check(net, optimizer(net, feedback=feedback, rank=rank, bellman=bellman, weight_decay=0.01, **METRICS[metric]))


@pytest.mark.parametrize("momentum", MOMENTUM)
@pytest.mark.parametrize("metric", ["adam", "ekfac, refreshed"])
def test_metrics_with_momentum(metric: str, momentum: str) -> None:
    net, options = make("sequence"), METRICS[metric] | MOMENTUM[momentum]
    check(net, optimizer(net, feedback="nonlinear", rank=3, weight_decay=0.01, **options))


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("beta", "projects"), [(0.3, False), (8.0, True)])
@pytest.mark.parametrize("feedback", ["nonlinear", "linear"])
def test_paper_mode_with_and_without_projection(feedback: str, beta: float, projects: bool, rank: int | str) -> None:
    net = make("mlp")
    options = METRICS["identity"] | {"lr": 0.3, "gauss_newton": beta, "momentum": 0.5}
    seen = check(net, optimizer(net, feedback=feedback, rank=rank, bellman="paper", weight_decay=0.01, **options))
    assert any(sum(e.solution.projections) > 0 for e in seen) == projects


@pytest.mark.parametrize("momentum", [{"momentum": 0.0}, *MOMENTUM.values()])
@pytest.mark.parametrize("feedback", ["nonlinear", "linear"])
@pytest.mark.parametrize(
    ("bellman", "metric"), [("consistent", "adam"), ("consistent", "ekfac"), ("paper", "identity")]
)
def test_decoupled_weight_decay(bellman: str, metric: str, feedback: str, momentum: dict[str, Any]) -> None:
    net = make("mlp")
    options = {"rank": 3, "weight_decay": 0.1, "decoupled_weight_decay": True, **METRICS[metric], **momentum}
    check(net, optimizer(net, feedback=feedback, bellman=bellman, **options))


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", NETS)
def test_linear_rollout_is_the_gauss_newton_step_of_the_whole_network(name: str, rank: int | str) -> None:
    net = make(name)
    opt = optimizer(net, rank=rank, weight_decay=0.01, **(METRICS["adam"] | MOMENTUM["heavy ball"]))
    dense = Dense(net, opt)
    for batch in net.batches[:2]:
        engine_step(net.model, opt, batch)
        dense.step(batch)
    thetas, (X, targets) = list(dense.thetas), net.batches[2]
    actual, e = stagewise(net, engine_step(net.model, opt, (X, targets))), dense.step((X, targets))
    cost = grouped_cost(lambda x: loss(x, targets), rank_of(rank), dense.game["gauss_newton"])
    plan = gauss_newton_step(dense.layers, thetas, X, cost, e.M, e.cost)
    e.dtheta = [fraction(dense.game, 3) * step for step in plan]
    assert_same_step(dense, actual, e)
    w = opt.diagnostics.w
    assert w is not None
    assert torch.equal(w, w[:1].expand_as(w))


@pytest.mark.parametrize("feedback", ["nonlinear", "linear"])
@pytest.mark.parametrize("momentum", MOMENTUM)
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("bellman", ["consistent", "paper"])
def test_predicted_change_of_the_loss(bellman: str, decoupled: bool, momentum: str, feedback: str) -> None:
    """Linear: ⟨∂L/∂θ, δθ⟩ of the step that was taken. Nonlinear: ⟨∂L/∂x_K, δx_K⟩."""
    net = make("mlp")
    options = METRICS["adam"] | MOMENTUM[momentum] | {"weight_decay": 0.1, "decoupled_weight_decay": decoupled}
    opt = optimizer(net, feedback=feedback, rank=3, bellman=bellman, **options)
    for X, targets in net.batches:
        output = net.model(X).detach()
        steps = engine_step(net.model, opt, (X, targets))
        expected = sum(float((p.grad * steps[n]).sum()) for n, p in net.model.named_parameters() if p.grad is not None)
        if feedback == "nonlinear":
            expected = float((torch.func.grad(loss)(output, targets) * (net.model(X).detach() - output)).sum())
        assert opt.diagnostics.predicted_change == pytest.approx(expected, rel=1e-9)


def test_rank_one_needs_no_model() -> None:
    net, twin = make("mixed"), make("mixed")
    options = {"weight_decay": 0.01, **METRICS["adam"], **MOMENTUM["corrected average"]}
    opt, alone = optimizer(net, **options), optimizer(twin, model=None, **options)
    dense = Dense(twin, alone)
    for batch in net.batches:
        with_model, without = engine_step(net.model, opt, batch), engine_step(twin.model, alone, batch)
        assert_same_step(dense, stagewise(twin, without), dense.step(batch))
        for name, step in without.items():
            assert_close(step, with_model[name], name)

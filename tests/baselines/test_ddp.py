"""Vanilla DDP against dense normal equations, its own promises, and the digits."""

from __future__ import annotations

import io

import pytest
import torch
from tests.baselines.digits import accuracy, batches
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call, jacrev

from ocnopt.baselines import DDP
from ocnopt.baselines.lq import Expansion, Plan, backward, expand
from ocnopt.lab.models import build


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / (2 * len(output))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("batch", [3, 12], ids=["fewer samples than inputs", "more samples than inputs"])
@pytest.mark.parametrize("bias", [True, False])
def test_one_step_of_a_linear_model_reaches_the_least_squares_optimum(batch: int, bias: bool) -> None:
    gamma, x, y = 0.1, randn(batch, 6), randn(batch, 4)
    model = nn.Sequential(nn.Linear(6, 4, bias=bias)).double()
    opt = DDP(model.parameters(), 1.0, model=model, loss_fn=squares, weight_decay=gamma, mu=0.0, mu_min=0.0)
    opt.step(x, y)
    x1 = torch.cat([x, torch.ones(batch, int(bias), dtype=x.dtype)], 1)
    normal = x1.T @ x1 / batch + gamma * torch.eye(6 + bias, dtype=x.dtype)
    best = torch.linalg.solve(normal, x1.T @ y / batch).T
    theta = torch.cat([model[0].weight, model[0].bias[:, None]], 1) if bias else model[0].weight
    torch.testing.assert_close(theta, best, rtol=1e-8, atol=1e-10)
    assert opt.outcome.alpha == 1.0
    assert opt.outcome.cost_after - opt.outcome.cost_before == pytest.approx(opt.outcome.promised, rel=1e-9)


def deep(activation: type[nn.Module]) -> nn.Sequential:
    tail = nn.Linear(5, 3)
    return nn.Sequential(nn.Linear(7, 4), activation(), nn.Linear(4, 5, bias=False), activation(), tail).double()


def planned(model: nn.Sequential, x: Tensor, y: Tensor, gamma: float, mu: float) -> tuple[list[Expansion], Plan]:
    opt = DDP(model.parameters(), model=model, loss_fn=squares, weight_decay=gamma)
    trajectory = opt.chain.trajectory(x, y, squares)
    expansions = [expand(*layer, state) for layer, state in zip(opt._layers, trajectory.states, strict=False)]
    plan = backward(expansions, *opt._terminal(trajectory, y), gamma, mu)
    assert plan is not None
    return expansions, plan


def linear_rollout(model: nn.Sequential, expansions: list[Expansion], plan: Plan, alpha: float) -> dict[str, Tensor]:
    """The policy run through the linearised network: changes of the parameters by name, and of the output."""
    changes: dict[str, Tensor] = {}
    delta_x = torch.zeros(expansions[0].inputs.numel(), dtype=torch.float64)
    layers = [(name, m) for name, m in model.named_children() if isinstance(m, nn.Linear)]
    for (name, layer), e, policy in zip(layers, expansions, plan.policies, strict=True):
        control = alpha * policy.k + (policy.K @ delta_x if policy.K is not None else 0)
        change = e.lift(control) + alpha * policy.unseen
        rows = torch.eye(e.g_z.shape[0] * e.g_z.shape[1], dtype=torch.float64)
        delta_x = e.times_f_x(rows) @ delta_x + e.times_f_u(rows) @ control
        changes[f"{name}.weight"] = change[:, : layer.in_features]
        if layer.bias is not None:
            changes[f"{name}.bias"] = change[:, -1]
    return changes | {"output": delta_x}


def dense(model: nn.Sequential, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """θ, the Jacobian of the joint output by autograd, and gradient and Hessian of the loss in it."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    jacobians = jacrev(lambda theta: functional_call(model, theta, (x,)).flatten())(parameters)
    output = model(x).detach()
    H = hessian(lambda z: squares(z, y), output).reshape(output.numel(), -1)
    return (
        torch.cat([p.flatten() for p in parameters.values()]),
        torch.cat([jacobians[name].flatten(1) for name in parameters], 1),
        ((output - y) / len(y)).flatten(),
        H,
    )


@pytest.mark.parametrize("activation", [nn.Identity, nn.Tanh], ids=["linear network", "tanh network"])
@pytest.mark.parametrize("batch", [3, 9])
def test_the_policy_is_the_gauss_newton_optimum_of_the_joint_problem(activation: type[nn.Module], batch: int) -> None:
    model, x, y, gamma = deep(activation), randn(batch, 7), randn(batch, 3), 0.05
    expansions, plan = planned(model, x, y, gamma, mu=0.0)
    changes = linear_rollout(model, expansions, plan, 1.0)
    theta, J, g, H = dense(model, x, y)
    normal = J.T @ H @ J + gamma * torch.eye(len(theta), dtype=theta.dtype)
    expected = -torch.linalg.solve(normal, J.T @ g + gamma * theta)
    found = torch.cat([changes[name].flatten() for name, _ in model.named_parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(changes["output"], J @ expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("alpha", "mu"), [(1.0, 0.0), (1.0, 0.4), (0.3, 0.0)])
def test_the_promise_is_what_the_regularised_policy_does_to_the_quadratic_model(alpha: float, mu: float) -> None:
    model, x, y, gamma = deep(nn.Tanh), randn(4, 7), randn(4, 3), 0.05
    expansions, plan = planned(model, x, y, gamma, mu)
    changes = linear_rollout(model, expansions, plan, alpha)
    theta, _, g, H = dense(model, x, y)
    delta = torch.cat([changes[name].flatten() for name, _ in model.named_parameters()])
    dx = changes["output"]
    change = g @ dx + dx @ H @ dx / 2 + gamma / 2 * ((theta + delta).square().sum() - theta.square().sum())
    assert plan.promised(alpha) == pytest.approx(change.item(), rel=1e-9)


def valley(output: Tensor, target: Tensor) -> Tensor:
    """√(1 + z²): a full Newton step from z goes to −z³, uphill when |z| > 1."""
    return (1 + (output - target).square()).sqrt().mean()


def scalar_model(z: float) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
    nn.init.constant_(model[0].weight, z)
    return model


ONE, ZERO = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)


def test_the_line_search_rejects_an_increase() -> None:
    model = scalar_model(1.5)
    opt = DDP(model.parameters(), 1.0, model=model, loss_fn=valley, mu=0.0, mu_min=0.0)
    opt.step(ONE, ZERO)
    assert 0 < opt.outcome.alpha < 1
    assert abs(model[0].weight.item()) < 1.5
    assert opt.outcome.cost_after == pytest.approx(valley(model(ONE), ZERO).item())
    assert opt.outcome.cost_after < opt.outcome.cost_before


def test_regularisation_grows_until_q_uu_is_positive_definite_and_shrinks_after_success() -> None:
    """1 − cos z has negative curvature at 2.5: only Q_uu + μI can be inverted, and it must lead downhill."""
    model = scalar_model(2.5)
    opt = DDP(model.parameters(), 1.0, model=model, loss_fn=lambda z, _: (1 - z.cos()).mean(), mu=1e-3, mu_min=1e-3)
    opt.step(ONE, ZERO)
    grown = opt.outcome.mu
    assert grown > -torch.tensor(2.5).cos().item()
    assert opt.outcome.cost_after < opt.outcome.cost_before
    assert opt._schedule["mu"] < grown


@pytest.mark.parametrize("start", [0.0, float("nan")], ids=["at the optimum", "not finite"])
def test_a_hopeless_batch_changes_nothing(start: float) -> None:
    model = scalar_model(start)
    opt = DDP(model.parameters(), model=model, loss_fn=valley)
    opt.step(ONE, ZERO)
    assert opt.outcome.alpha == 0.0
    assert torch.equal(model[0].weight, torch.full((1, 1), start, dtype=torch.float64)) or start != start
    assert opt._schedule == {"mu": 1.0, "growth": 1.0}


def test_feedback_is_part_of_the_rollout() -> None:
    """The second layer's change answers to how far its input really moved: α k + K δx, not α k alone."""
    model, x, y = deep(nn.Tanh), randn(4, 7), randn(4, 3)
    expansions, plan = planned(model, x, y, 0.05, 0.1)
    opt = DDP(model.parameters(), 1.0, model=model, loss_fn=squares, weight_decay=0.05)
    states = opt.chain.trajectory(x, y, squares).states
    thetas, output = opt._rollout(plan, expansions, states, 0.5)
    first = thetas[0]
    moved = torch.tanh(x @ first[:, :7].T + first[:, 7]) - states[1]
    expected = expansions[1].theta + expansions[1].lift(0.5 * plan.policies[1].k + plan.policies[1].K @ moved.flatten())
    torch.testing.assert_close(thetas[1], expected + 0.5 * plan.policies[1].unseen, rtol=1e-10, atol=1e-12)
    x2 = torch.tanh(torch.tanh(x @ first[:, :7].T + first[:, 7]) @ thetas[1].T)
    torch.testing.assert_close(output, x2 @ thetas[2][:, :5].T + thetas[2][:, 5], rtol=1e-10, atol=1e-12)


def test_resuming_from_a_checkpoint_is_bit_exact() -> None:
    def make() -> tuple[nn.Module, DDP]:
        model = build("fcn", (64,), 10, width=8)
        return model, DDP(model.parameters(), model=model)

    data = list(batches(4, 6))
    model, opt = make()
    for x, y in data:
        opt.step(x, y)
    first, first_opt = make()
    for x, y in data[:3]:
        first_opt.step(x, y)
    saved = io.BytesIO()
    torch.save({"model": first.state_dict(), "opt": first_opt.state_dict()}, saved)
    saved.seek(0)
    checkpoint = torch.load(saved, weights_only=True)
    second, second_opt = make()
    second.load_state_dict(checkpoint["model"])
    second_opt.load_state_dict(checkpoint["opt"])
    assert second_opt._schedule["mu"] != 1.0
    for x, y in data[3:]:
        second_opt.step(x, y)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), second.parameters(), strict=True))


def test_sizes_beyond_the_limit_are_refused_before_anything_is_formed() -> None:
    model = build("fcn", (784,), 10, dataset="MNIST")
    opt = DDP(model.parameters(), model=model)
    x, y = torch.randn(128, 784), torch.zeros(128, dtype=torch.long)
    with pytest.raises(ValueError, match=r"a batch of 128\) need a matrix of 4096 rows at layer '1'.*max_size=2048"):
        opt.step(x, y)
    small = DDP(model.parameters(), model=model, max_size=63)
    with pytest.raises(ValueError, match="matrix of 64 rows"):
        small.step(x[:2], y[:2])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Conv2d(1, 1, 3)), "layer '1' is Conv2d"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False)), "after layer '0' comes BatchNorm1d"),
        (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), "layer '1' is LayerNorm"),
    ],
    ids=["conv", "batch norm", "layer norm"],
)
def test_other_layers_are_refused(model: nn.Sequential, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DDP(model.parameters(), model=model)


def test_partial_parameters_and_sequences_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="params must hold every parameter of model"):
        DDP(model[0].parameters(), model=model)
    with pytest.raises(ValueError, match=r"inputs must reach layer '0' as \[batch, features\]; got \(3, 4, 2\)"):
        DDP(model.parameters(), model=model, loss_fn=squares).step(torch.ones(3, 4, 2), torch.ones(3, 4, 2))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.0),
        ("lr", 2.0),
        ("weight_decay", -1.0),
        ("mu", 0.0),
        ("mu_factor", 1.0),
        ("accept", 1.0),
        ("max_size", 0),
    ],
)
def test_bad_arguments_are_named(name: str, value: float) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"{name} must be .*; got {value}"):
        DDP(model.parameters(), model=model, **{name: value})


def test_learns_the_digits() -> None:
    model = build("fcn", (64,), 10, dataset="digits")
    opt = DDP(model.parameters(), model=model)
    for x, y in batches(8, 80):
        opt.step(x, y)
    assert accuracy(model) >= 0.85

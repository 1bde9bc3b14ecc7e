"""E-MSA against autograd, the closed form of a linear layer, and the digits."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from tests.baselines.digits import accuracy, batches
from torch import Tensor, nn

from ocnopt.baselines import EMSA
from ocnopt.baselines.emsa import AugmentedHamiltonian, maximise
from ocnopt.lab.models import BasicBlock, ResidualBlock, build


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def networks() -> dict[str, tuple[nn.Sequential, Tensor]]:
    image = torch.randn(5, 2, 6, 6, dtype=torch.float64)
    tanh = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)]
    nested = [nn.Flatten(), nn.Sequential(nn.Linear(72, 4), nn.ReLU()), nn.Linear(4, 3)]
    residual = [nn.Conv2d(2, 3, 3), nn.ReLU(), ResidualBlock(3, 4), nn.Flatten(), nn.Linear(64, 3)]
    batch_norm = [nn.Conv2d(2, 3, 3), BasicBlock(3, 3), nn.Flatten(), nn.Linear(48, 3)]
    return {
        "tanh": (nn.Sequential(*tanh).double(), image[:, 0, 0, :4]),
        "nested with a prefix": (nn.Sequential(*nested).double(), image),
        "residual": (nn.Sequential(*residual).double(), image),
        "batch norm": (nn.Sequential(*batch_norm).double(), image),
    }


@pytest.mark.parametrize("rho", [0.0, 2.0])
@pytest.mark.parametrize("kind", networks())
def test_gradient_of_the_hamiltonian_is_minus_the_gradient_of_the_loss(kind: str, rho: float) -> None:
    """At the current parameters, for every ρ: the penalties have their minimum, zero, there."""
    model, x = networks()[kind]
    y, gamma = torch.tensor([0, 2, 1, 1, 0]), 0.1
    opt = EMSA(model.parameters(), model=model, rho=rho, weight_decay=gamma)
    trajectory = opt.chain.trajectory(x, y, opt.loss_fn)
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    expected = iter(zip(model.parameters(), gradients, strict=True))
    for k, stage in enumerate(opt.chain.stages):
        theta = {name: p.detach().requires_grad_() for name, p in stage.module.named_parameters()}
        H = opt.hamiltonian(trajectory, k)(theta)
        for H_theta in torch.autograd.grad(H, list(theta.values())):
            p, gradient = next(expected)
            torch.testing.assert_close(H_theta, -gradient - gamma * p, rtol=1e-9, atol=1e-12)
    assert next(expected, None) is None


def linear_quadratic(bias: bool) -> tuple[AugmentedHamiltonian, dict[str, Tensor], Tensor]:
    """H̃ of a linear layer, made of unrelated x, v, p, q; its parameters; and its maximiser from the normal equations.

    With S cutting off the bias column, ∂H̃/∂Θ = 0 reads
    ρ(Θ E[x̃x̃^T] + E[pp^T] Θ SS^T) + γΘ = E[p x̃^T] + ρ(E[v x̃^T] + E[p q^T] S^T).
    """
    rho, gamma, batch, n, m = 0.7, 0.05, 9, 4, 3
    layer = nn.Linear(n, m, bias=bias).double()
    x, q = torch.randn(batch, n, dtype=torch.float64), torch.randn(batch, n, dtype=torch.float64)
    v, p = torch.randn(batch, m, dtype=torch.float64), torch.randn(batch, m, dtype=torch.float64)
    H = AugmentedHamiltonian(layer, x, v, p, q, rho, gamma)
    x1 = torch.cat([x, torch.ones(batch, int(bias), dtype=x.dtype)], 1)
    cut = torch.eye(n + bias, n, dtype=x.dtype)
    A, C = x1.T @ x1 / batch, p.T @ p / batch
    eye = torch.eye(m * (n + bias), dtype=x.dtype)
    normal = rho * (torch.kron(torch.eye(m), A) + torch.kron(C, cut @ cut.T)) + gamma * eye
    right = p.T @ x1 / batch + rho * (v.T @ x1 + p.T @ q @ cut.T) / batch
    best = torch.linalg.solve(normal, right.flatten()).view(m, n + bias)
    return H, {name: t.detach() for name, t in layer.named_parameters()}, best


@pytest.mark.parametrize("bias", [False, True])
def test_maximiser_of_a_linear_layer_is_the_closed_form(bias: bool) -> None:
    H, start, best = linear_quadratic(bias)
    found, gain = maximise(H, start, max_iter=300, history_size=30)
    theta = torch.cat([found["weight"], found["bias"][:, None]], 1) if bias else found["weight"]
    torch.testing.assert_close(theta, best, rtol=1e-5, atol=1e-6)  # as near as a line search on values can get
    columns = {"weight": best[:, :4]} | ({"bias": best[:, 4]} if bias else {})
    columns = {name: t.clone().requires_grad_() for name, t in columns.items()}
    for slope in torch.autograd.grad(H(columns), list(columns.values())):
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-12)
    assert gain == pytest.approx((H(columns) - H(start)).item(), rel=1e-9)


def test_every_stage_raises_its_hamiltonian_and_the_loss_falls() -> None:
    model, x = networks()["tanh"]
    y = torch.tensor([0, 2, 1, 1, 0])
    opt = EMSA(model.parameters(), model=model)
    trajectory = opt.chain.trajectory(x, y, opt.loss_fn)
    before = [dict(s.module.state_dict()) for s in opt.chain.stages]
    before = [{name: t.clone() for name, t in theta.items()} for theta in before]
    loss = opt.step(x, y)
    assert loss.item() == pytest.approx(trajectory.loss.item())
    for k, stage in enumerate(opt.chain.stages):
        H = opt.hamiltonian(trajectory, k)
        rise = H(dict(stage.module.state_dict())) - H(before[k])
        assert rise.item() > 0
        assert opt.gains[stage.name] == pytest.approx(rise.item(), rel=1e-9)
    assert F.cross_entropy(model(x), y).item() < loss.item()


def test_a_larger_rho_keeps_states_and_costates_closer() -> None:
    def distance(rho: float) -> float:
        torch.manual_seed(0)
        model, x = networks()["tanh"]
        before = [p.detach().clone() for p in model.parameters()]
        EMSA(model.parameters(), model=model, rho=rho).step(x, torch.tensor([0, 2, 1, 1, 0]))
        return sum((p - q).norm().item() for p, q in zip(model.parameters(), before, strict=True))

    assert distance(1.0) > 2 * distance(10.0) > 4 * distance(100.0)


def test_a_maximisation_that_fails_is_undone() -> None:
    def not_finite(theta: Mapping[str, Tensor]) -> Tensor:
        return theta["w"].sum() * float("nan")

    start = {"w": torch.ones(3)}
    found, gain = maximise(not_finite, start, max_iter=5, history_size=5)
    assert torch.equal(found["w"], start["w"])
    assert gain == 0.0


def test_lr_goes_part_of_the_way() -> None:
    moves = []
    for lr in (1.0, 0.25):
        torch.manual_seed(0)
        model, x = networks()["tanh"]
        before = model[0].weight.detach().clone()
        EMSA(model.parameters(), lr, model=model).step(x, torch.tensor([0, 2, 1, 1, 0]))
        moves.append(model[0].weight - before)
    torch.testing.assert_close(moves[1], 0.25 * moves[0])


def test_gradients_and_batch_statistics_are_not_disturbed() -> None:
    """The many evaluations of a layer count as one forward pass, and ``p.grad`` belongs to the user."""
    model, x = networks()["batch norm"]
    norm = model[1].bn1
    opt = EMSA(model.parameters(), model=model)
    expected_mean = norm.running_mean * 0.9 + 0.1 * model[1].conv1(model[0](x)).mean((0, 2, 3))
    opt.step(x, torch.tensor([0, 2, 1, 1, 0]))
    assert norm.num_batches_tracked.item() == 1
    torch.testing.assert_close(norm.running_mean, expected_mean)
    assert all(p.grad is None for p in model.parameters())


def test_parameters_left_out_stay_fixed() -> None:
    model, x = networks()["tanh"]
    frozen = [p.detach().clone() for p in model[2].parameters()]
    moving = model[0].weight.detach().clone()
    opt = EMSA([*model[0].parameters(), model[4].weight], model=model)
    opt.step(x, torch.tensor([0, 2, 1, 1, 0]))
    assert all(torch.equal(p, q) for p, q in zip(model[2].parameters(), frozen, strict=True))
    assert not torch.equal(model[0].weight, moving)
    assert set(opt.gains) == {"0", "4"}


def test_resuming_from_a_checkpoint_is_bit_exact() -> None:
    def make() -> tuple[nn.Module, EMSA]:
        model = build("fcn", (64,), 10, dataset="digits")
        return model, EMSA(model.parameters(), 0.9, model=model, rho=4.0)

    data = list(batches(16, 4))
    model, opt = make()
    for x, y in data:
        opt.step(x, y)
    first, first_opt = make()
    for x, y in data[:2]:
        first_opt.step(x, y)
    saved = io.BytesIO()
    torch.save({"model": first.state_dict(), "opt": first_opt.state_dict()}, saved)
    saved.seek(0)
    checkpoint = torch.load(saved, weights_only=True)
    second = build("fcn", (64,), 10, dataset="digits", seed=1)
    second_opt = EMSA(second.parameters(), model=second)  # lr and ρ come from the checkpoint
    second.load_state_dict(checkpoint["model"])
    second_opt.load_state_dict(checkpoint["opt"])
    for x, y in data[2:]:
        second_opt.step(x, y)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0.0), ("lr", 1.5), ("rho", -1.0), ("weight_decay", -1.0), ("max_iter", 0), ("history_size", 0)],
)
def test_bad_arguments_are_named(name: str, value: float) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"{name} must be .*; got {value}"):
        EMSA(model.parameters(), model=model, **{name: value})


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


def shared() -> nn.Sequential:
    layer = nn.Linear(2, 2)
    return nn.Sequential(layer, nn.Tanh(), layer)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Forked(), "model must be a chain of layers .* Forked"),
        (shared(), "model shares a parameter between layers '0' and '2'"),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), "model has dropout at layer '1'"),
        (nn.Sequential(nn.Linear(2, 2), nn.Sequential(Forked(), nn.Dropout(0.1))), "model has dropout at layer '1.1'"),
    ],
    ids=["not a chain", "shared", "dropout", "nested dropout"],
)
def test_models_that_are_no_chain_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EMSA(model.parameters(), model=model)


def test_parameters_that_would_never_train_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="params holds a tensor that is not a parameter of model"):
        EMSA([*model.parameters(), nn.Parameter(torch.ones(1))], model=model)
    with pytest.raises(ValueError, match="params must be one group for EMSA; got 2"):
        EMSA([{"params": [model[0].weight]}, {"params": [model[0].bias]}], model=model)
    with pytest.raises(ValueError, match="model has no parameters to train"):
        EMSA(model.parameters(), model=nn.Sequential(nn.Tanh()))


def test_inputs_and_losses_that_do_not_fit_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="inputs must be floating-point"):
        EMSA(model.parameters(), model=model).step(torch.ones(3, 2, dtype=torch.long), torch.zeros(3, dtype=torch.long))
    opt = EMSA(model.parameters(), model=model, loss_fn=nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(ValueError, match=r"loss_fn must return a scalar.* got shape \(3,\)"):
        opt.step(torch.ones(3, 2), torch.zeros(3, dtype=torch.long))


def test_learns_the_digits() -> None:
    model = build("fcn", (64,), 10, dataset="digits")
    opt = EMSA(model.parameters(), model=model)
    for x, y in batches(16, 100):
        opt.step(x, y)
    assert accuracy(model) >= 0.90

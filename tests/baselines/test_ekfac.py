"""EKFAC against per-sample gradients by autograd, the dense Fisher where EKFAC is exact, and the digits."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.baselines.digits import accuracy, batches
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from ocnopt.baselines import EKFAC
from ocnopt.lab.models import build

DAMPING = 0.03


def double(module: nn.Module) -> nn.Module:
    return module.double()


def per_sample_gradients(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor]) -> dict[str, Tensor]:
    """``{name: [B, *shape]}`` of the single samples' losses, by autograd alone."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def one(theta: dict[str, Tensor], x_i: Tensor, y_i: Tensor) -> Tensor:
        return loss(functional_call(model, theta, (x_i[None],)), y_i[None])

    return vmap(grad(one), in_dims=(None, 0, 0))(parameters, x, y)


def as_matrix(gradients: dict[str, Tensor], layer: str) -> Tensor:
    """Weight and bias of a layer side by side, ``[B, c, a]``."""
    parts = [gradients[f"{layer}.weight"].flatten(2)]
    if f"{layer}.bias" in gradients:
        parts.append(gradients[f"{layer}.bias"][:, :, None])
    return torch.cat(parts, dim=2)


def backward(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor] = F.cross_entropy) -> None:
    loss(model(x), y).backward()


def small_problem(model: nn.Module, *shape: int, batch: int = 6) -> tuple[nn.Module, Tensor, Tensor]:
    return double(model), torch.randn(batch, *shape, dtype=torch.float64), torch.randint(3, (batch,))


CONVOLUTIONS = {
    "stride and padding": nn.Conv2d(2, 3, 3, stride=2, padding=1),
    "dilation": nn.Conv2d(2, 3, 2, dilation=2),
    "uneven": nn.Conv2d(2, 3, (1, 3), stride=(2, 1), padding=(2, 0)),
    "same": nn.Conv2d(2, 3, (3, 5), padding="same"),
    "circular": nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
    "no bias": nn.Conv2d(2, 3, 3, bias=False),
}


class Tokens(nn.Module):
    """A Linear layer at several positions of each sample, used twice in one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x))).mean(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_scalings_of_a_convolution_are_the_per_sample_second_moments_in_the_eigenbasis(kind: str) -> None:
    conv = CONVOLUTIONS[kind]
    model, x, y = small_problem(nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3)), 2, 6, 5)
    model(x)  # the lazy layer learns its size
    check_scalings(model, "0", x, y)


def test_scalings_of_linear_layers_are_the_per_sample_second_moments_in_the_eigenbasis() -> None:
    model, x, y = small_problem(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)), 4)
    check_scalings(model, "0", x, y)
    check_scalings(model, "2", x, y)


def test_scalings_of_a_layer_used_at_many_positions_and_twice() -> None:
    model, x, y = small_problem(Tokens(), 4, 3)
    check_scalings(model, "layer", x, y)


def check_scalings(model: nn.Module, layer: str, x: Tensor, y: Tensor) -> None:
    model.zero_grad()
    g = as_matrix(per_sample_gradients(model, x, y, F.cross_entropy), layer)
    opt = EKFAC(model.parameters(), 0.0, model=model)
    backward(model, x, y)
    opt.step()
    opt.detach()
    state = opt.state[model.get_submodule(layer).weight]
    for basis, factor in (("U_A", "A"), ("U_C", "C")):
        rotated = state[basis].T @ state[factor] @ state[basis]
        assert torch.allclose(rotated, rotated.diagonal().diag(), atol=1e-10)
    brute = (state["U_C"].T @ g @ state["U_A"]).square().mean(0)
    torch.testing.assert_close(state["s"], brute, rtol=1e-10, atol=1e-12)


def natural_step(g: Tensor, total: Tensor) -> Tensor:
    """(E[g g^T] + λI)^{-1} ḡ with the dense Fisher, in the shape of the weights."""
    flat = g.flatten(1)
    fisher = flat.T @ flat / len(flat) + DAMPING * torch.eye(flat.shape[1], dtype=flat.dtype)
    return torch.linalg.solve(fisher, total.flatten()).view_as(total)


def test_one_sample_gives_the_dense_natural_gradient_step() -> None:
    model, x, y = small_problem(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), 4, batch=1)
    check_dense_step(model, x, y, F.cross_entropy, ["0", "2"])


def test_independent_inputs_and_adjoints_give_the_dense_natural_gradient_step() -> None:
    """Every input meets every adjoint: E[h h^T ⊗ x x^T] = C ⊗ A exactly, and neither factor is diagonal."""
    inputs, adjoints = torch.randn(5, 3, dtype=torch.float64), torch.randn(7, 2, dtype=torch.float64) + 0.5
    x, h = inputs.repeat_interleave(7, 0), adjoints.repeat(5, 1)
    model = nn.Sequential(nn.Linear(3, 2)).double()
    check_dense_step(model, x, h, lambda output, h: (output * h).sum() / len(h), ["0"])


def check_dense_step(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor], layers: list[str]) -> None:
    gradients = per_sample_gradients(model, x, y, loss)
    opt = EKFAC(model.parameters(), 0.7, model=model, damping=DAMPING)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    backward(model, x, y, loss)
    opt.step()
    for layer in layers:
        g = as_matrix(gradients, layer)
        step = natural_step(g, g.mean(0))
        for name, expected in ((f"{layer}.weight", step[:, :-1]), (f"{layer}.bias", step[:, -1])):
            change = model.get_parameter(name) - before[name]
            torch.testing.assert_close(change, -0.7 * expected, rtol=1e-9, atol=1e-11)


def test_five_steps_with_amortised_basis_momentum_and_decay_by_hand() -> None:
    """The basis changes at steps 0 and 3 only; A, C and s are running averages; s goes on in the new basis."""
    model, _, _ = small_problem(nn.Sequential(nn.Linear(4, 3)), 4)
    (weight, bias), lr, mu, gamma, rho = model.parameters(), 0.1, 0.8, 0.02, 0.6
    opt = EKFAC(
        model.parameters(), lr, model=model, momentum=mu, weight_decay=gamma, damping=DAMPING,
        factor_decay=rho, refresh_every=3,
    )  # fmt: skip
    theta = torch.cat([weight, bias[:, None]], 1).detach().clone()
    buffer = torch.zeros_like(theta)
    A = C = s = U_A = U_C = None
    for t in range(5):
        x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
        g = as_matrix(per_sample_gradients(model, x, y, F.cross_entropy), "0")
        x1 = torch.cat([x, torch.ones(6, 1, dtype=x.dtype)], 1)
        h = torch.softmax(model(x), 1).detach() - F.one_hot(y, 3)
        A = x1.T @ x1 / 6 if A is None else rho * A + (1 - rho) * x1.T @ x1 / 6
        C = h.T @ h / 6 if C is None else rho * C + (1 - rho) * h.T @ h / 6
        if t % 3 == 0:
            before = None if s is None else torch.einsum("pi,ij,qi,rj,sj->prqs", U_C, s, U_C, U_A, U_A)  # U diag(s) U^T
            U_A, U_C = torch.linalg.eigh(A)[1], torch.linalg.eigh(C)[1]
            s = None if before is None else torch.einsum("pi,qi,prqs,rj,sj->ij", U_C, U_C, before, U_A, U_A)
        new = (U_C.T @ g @ U_A).square().mean(0)
        s = new if s is None else rho * s + (1 - rho) * new
        direction = U_C @ ((U_C.T @ g.mean(0) @ U_A) / (s + DAMPING)) @ U_A.T + gamma * theta
        buffer = mu * buffer + direction
        theta = theta - lr * buffer
        opt.zero_grad()
        backward(model, x, y)
        opt.step()
        torch.testing.assert_close(torch.cat([weight, bias[:, None]], 1), theta, rtol=1e-9, atol=1e-11)


def test_other_parameters_follow_sgd_with_momentum() -> None:
    """Norms and grouped convolutions have no Kronecker structure of this kind."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.Flatten()).double()
    twin = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.Flatten()).double()
    twin.load_state_dict(model.state_dict())
    opt = EKFAC(model.parameters(), 0.1, model=model, momentum=0.9, weight_decay=0.01)
    sgd = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    for _ in range(3):
        x, y = torch.randn(5, 2, 3, 3, dtype=torch.float64), torch.randint(4, (5,))
        for net, optimizer in ((model, opt), (twin, sgd)):
            optimizer.zero_grad()
            backward(net, x, y)
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_accumulated_micro_batches_equal_the_whole_batch() -> None:
    model, x, y = small_problem(nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 3)), 1, 3, 3, batch=8)
    twin = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 3)).double()
    twin.load_state_dict(model.state_dict())
    for net, parts in ((model, 1), (twin, 4)):
        opt = EKFAC(net.parameters(), 0.1, model=net)
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (F.cross_entropy(net(x_part), y_part) / parts).backward()
        opt.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_passes_that_are_not_stepped_leave_no_trace() -> None:
    """Evaluation, a forward pass without backward, and a discarded backward pass."""
    model, x, y = small_problem(nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)), 4)
    twin = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)).double()
    twin.load_state_dict(model.state_dict())
    opt, clean = EKFAC(model.parameters(), model=model), EKFAC(twin.parameters(), model=twin)
    backward(model, 10 * x, y)
    opt.zero_grad()
    model(3 * x)
    backward(model, x, y)
    with torch.no_grad():
        model(5 * x)
    backward(twin, x, y)
    opt.step()
    clean.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_resuming_from_a_checkpoint_is_bit_exact() -> None:
    def make() -> tuple[nn.Module, EKFAC]:
        model = build("fcn", (64,), 10, dataset="digits")
        return model, EKFAC(model.parameters(), model=model, momentum=0.5, refresh_every=3)

    def train(model: nn.Module, opt: EKFAC, data: list[tuple[Tensor, Tensor]]) -> None:
        for x, y in data:
            opt.zero_grad()
            backward(model, x, y)
            opt.step()

    data = list(batches(16, 8))
    model, opt = make()
    train(model, opt, data)
    first, first_opt = make()
    train(first, first_opt, data[:4])
    saved = io.BytesIO()
    torch.save({"model": first.state_dict(), "opt": first_opt.state_dict()}, saved)
    saved.seek(0)
    checkpoint = torch.load(saved, weights_only=True)
    second, second_opt = make()
    second.load_state_dict(checkpoint["model"])
    second_opt.load_state_dict(checkpoint["opt"])
    train(second, second_opt, data[4:])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), second.parameters(), strict=True))


def test_what_was_loaded_is_not_written_to() -> None:
    model, x, y = small_problem(nn.Sequential(nn.Linear(4, 3)), 4)
    opt = EKFAC(model.parameters(), model=model)
    backward(model, x, y)
    opt.step()
    saved = opt.state_dict()
    kept, twin = copy.deepcopy(saved), nn.Sequential(nn.Linear(4, 3)).double()
    resumed = EKFAC(twin.parameters(), model=twin)
    resumed.load_state_dict(saved)
    backward(twin, 2 * x, y)
    resumed.step()
    for key, value in kept["state"][0].items():
        assert torch.equal(torch.as_tensor(saved["state"][0][key]), torch.as_tensor(value))


def test_step_returns_the_loss_of_its_closure_and_keeps_the_gradient() -> None:
    model, x, y = small_problem(nn.Sequential(nn.Linear(4, 3)), 4)
    opt = EKFAC(model.parameters(), model=model)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    expected = F.cross_entropy(model(x), y)
    gradient = torch.autograd.grad(expected, model[0].weight)[0]
    assert opt.step(closure).item() == pytest.approx(expected.item())
    assert torch.equal(model[0].weight.grad, gradient)


def test_a_factor_that_is_not_finite_keeps_the_basis_and_says_so() -> None:
    model, x, y = small_problem(nn.Sequential(nn.Linear(4, 3)), 4)
    opt = EKFAC(model.parameters(), 0.0, model=model, refresh_every=1)
    backward(model, x, y)
    opt.step()
    basis = opt.state[model[0].weight]["U_A"].clone()
    backward(model, x * float("inf"), y)
    with (
        pytest.warns(UserWarning, match="keeps the old basis of layer '0': factor C is not finite"),
        pytest.warns(UserWarning, match="keeps the old basis of layer '0': factor A is not finite"),
    ):
        opt.step()
    assert torch.equal(opt.state[model[0].weight]["U_A"], basis)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("momentum", 1.0),
        ("weight_decay", -1.0),
        ("damping", 0.0),
        ("factor_decay", 1.0),
        ("refresh_every", 0),
    ],
)
def test_bad_arguments_are_named(name: str, value: float) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"{name} must be .*; got {value}"):
        EKFAC(model.parameters(), model=model, **{name: value})


def test_what_cannot_be_factorised_is_refused() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="ties the weights of layers '0' and '1'"):
        EKFAC(tied.parameters(), model=tied)
    with pytest.raises(ValueError, match="bias of layer '' as well, or freeze it"):
        EKFAC([(layer := nn.Linear(2, 2)).weight], model=layer)
    half = nn.Linear(2, 2).bfloat16()
    with pytest.raises(ValueError, match="float32 or float64"):
        EKFAC(half.parameters(), model=half)


def test_a_bias_that_is_frozen_later_leaves_a_block_of_its_own() -> None:
    model, x, y = small_problem(nn.Sequential(nn.Linear(4, 3)), 4)
    opt = EKFAC(model.parameters(), 0.1, model=model)
    for frozen in (False, True):
        model[0].bias.requires_grad_(not frozen)
        opt.zero_grad()
        backward(model, x, y)
        weight, bias = model[0].weight.detach().clone(), model[0].bias.detach().clone()
        opt.step()
        assert torch.equal(model[0].bias, bias) == frozen
        assert not torch.equal(model[0].weight, weight)
    assert opt.state[model[0].weight]["A"].shape == (4, 4)


def test_a_model_that_was_not_run_is_noticed() -> None:
    model, x, y = small_problem(nn.Sequential(nn.Linear(4, 3)), 4)
    opt = EKFAC(model.parameters(), model=nn.Sequential(*model))
    opt.detach()
    backward(model, x, y)
    with pytest.raises(RuntimeError, match="no backward pass through layer '0'"):
        opt.step()


def test_learns_the_digits() -> None:
    model = build("fcn", (64,), 10, dataset="digits")
    opt = EKFAC(model.parameters(), model=model)
    for x, y in batches(16, 270):
        opt.zero_grad()
        backward(model, x, y)
        opt.step()
    assert accuracy(model) >= 0.93

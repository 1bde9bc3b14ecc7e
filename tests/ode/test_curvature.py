"""Kronecker factors along the solve: against dense integration, against gradients of single samples, and what they
must not touch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ode.fields import METHODS, TIGHT, Net, batch, inner_calls, loss_of, network, optimizer, options_of
from torch import Tensor, nn

from ocnopt import Groups, layers
from ocnopt.hosts import Execution
from ocnopt.layers.base import Call
from ocnopt.ode import NeuralODE
from ocnopt.ode.layers import ConcatConv2d, ConcatSquashLinear, TimeSequential
from ocnopt.ode.quadrature import gauss_legendre
from ocnopt.reference.ode import rk4

B, T = 5, 1.5


# --- gradients stay what they are ---


SOLVES = [(m, g) for m in METHODS for g in ("adjoint", "discretize") if (m, g) != ("scipy_solver", "discretize")]


@pytest.mark.parametrize(("method", "gradient"), SOLVES)
def test_collecting_changes_no_bit_of_the_gradient(method: str, gradient: str) -> None:
    make: Callable[[], nn.Sequential] = lambda: network(  # noqa: E731
        NeuralODE(Net(), solver=method, options=options_of(method, 0.2), gradient=gradient)
    )
    plain, watched = make(), make()
    opt, x = optimizer(watched), batch(B)
    for _ in range(2):  # with a refresh and without
        plain.load_state_dict(watched.state_dict())
        plain.zero_grad()
        loss_of(plain, x).backward()
        opt.zero_grad()
        loss_of(watched, x).backward()
        before = [p.grad.clone() for p in watched.parameters()]
        random = torch.get_rng_state()
        opt.step()
        assert torch.equal(random, torch.get_rng_state())
        for p, q, g in zip(plain.parameters(), watched.parameters(), before, strict=True):
            assert torch.equal(p.grad, g)
            assert torch.equal(q.grad, g)
    assert watched[2].nfe.curvature > 0
    assert "input_factor" in opt.state[watched[2].field.one.weight]


def test_only_refresh_steps_look_at_the_field() -> None:
    model = network(NeuralODE(Net()))
    opt, seen = optimizer(model, refresh_every=4), []
    for _ in range(18):
        opt.zero_grad()
        loss_of(model, batch(B)).backward()
        opt.step()
        seen.append(model[2].nfe.curvature > 0)
        model[2].nfe.reset()
    # the first ones follow each other quickly
    assert [i for i, looked in enumerate(seen, 1) if looked] == [1, 2, 3, 4, 6, 9, 13, 17]


@pytest.mark.parametrize("gradient", ["adjoint", "discretize"])
def test_what_is_kept_does_not_grow_with_the_number_of_steps(gradient: str) -> None:
    sizes = []
    for step in (0.1, 0.01):
        block = NeuralODE(Net(), solver="rk4", options={"step_size": step}, gradient=gradient)
        calls = inner_calls(block, batch(B))
        sizes.append([len(each) for each in calls.values()])
    assert sizes == [[4, 4], [4, 4]]


# --- factors ---


class Dense:
    """∫ z z^T dt and ∫ h h^T dt of :class:`Net` by Simpson's rule on a fine grid, with explicit layer Jacobians."""

    def __init__(self, field: Net, x_T: Tensor, q_T: Tensor, intervals: int = 200) -> None:
        self.field, self.samples = field, len(x_T)
        path = rk4(self._pair, (x_T.detach(), q_T), T, 0.0, intervals)
        dt = T / intervals
        self.points = [self._factors(torch.tensor(T - i * dt), x, q) for i, (x, q) in enumerate(path)]

    def _hidden(self, t: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.cat([x, t.double().expand(len(x), 1)], 1)
        return z, torch.tanh(z @ self.field.one.weight.T + self.field.one.bias)

    def _pair(self, t: Tensor, pair: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, q = pair
        _, a = self._hidden(t, x)
        speed = a @ self.field.two.weight.T + self.field.two.bias
        inner = (q @ self.field.two.weight) * (1 - a**2)
        return speed.detach(), -(inner @ self.field.one.weight[:, :-1]).detach()

    def _factors(self, t: Tensor, x: Tensor, q: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        z, a = self._hidden(t, x)
        jacobians = torch.stack([self.field.two.weight @ torch.diag(1 - row**2) for row in a])  # ∂F/∂(output of one)
        h = torch.einsum("bij,bi->bj", jacobians, q)
        return {"one": self._outer(z, h), "two": self._outer(a, q)}

    def _outer(self, z: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        z, h = torch.cat([z, torch.ones_like(z[:, :1])], 1).detach(), (self.samples * h).detach()
        return z.T @ z / len(z), h.T @ h / len(h)

    def simpson(self, name: str, which: int) -> Tensor:
        values = [point[name][which] for point in self.points]
        n = len(values) - 1
        weights = [1.0, *(4.0 if i % 2 else 2.0 for i in range(1, n)), 1.0]
        return sum(w * v for w, v in zip(weights, values, strict=True)) * T / n / 3

    def uniform(self, name: str, which: int, samples: int) -> Tensor:
        chosen = torch.linspace(0, len(self.points) - 1, samples).round().long()
        return torch.stack([self.points[i][name][which] for i in chosen]).mean(0) * T


def factors(gradient: str, nodes: int) -> tuple[dict[str, tuple[Tensor, Tensor]], Dense]:
    model = network(NeuralODE(Net(), t=(0.0, T), gradient=gradient, nodes=nodes, **TIGHT))
    opt, x = optimizer(model), batch(B)
    kept: list[Tensor] = []
    model[2].register_forward_hook(lambda m, a, out: kept.append(out))
    loss = loss_of(model, x)
    (q,) = torch.autograd.grad(loss, kept[0], retain_graph=True)
    loss.backward()
    field = copy.deepcopy(model[2].field)
    opt.step()
    states = {n: opt.state[getattr(model[2].field, n).weight] for n in ("one", "two")}
    found = {n: (s["input_factor"][0], s["output_factor"][0]) for n, s in states.items()}
    return found, Dense(field, kept[0], q)


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


DEFAULT = inspect.signature(NeuralODE).parameters["nodes"].default


@pytest.mark.parametrize(("nodes", "bound"), [(6, 1e-9), (DEFAULT, 1e-6)])
@pytest.mark.parametrize("gradient", ["adjoint", "discretize"])
def test_factors_agree_with_dense_integration(gradient: str, nodes: int, bound: float) -> None:
    found, dense = factors(gradient, nodes)
    for name, pair in found.items():
        for which, factor in enumerate(pair):
            assert error(factor, dense.simpson(name, which)) < bound


@pytest.mark.parametrize("where", ["options", "adjoint_options"])
def test_a_norm_of_the_state_is_not_asked_about_the_larger_one_of_the_look(where: str) -> None:
    sizes: set[int] = set()

    def norm(y: Any) -> Tensor:
        parts = y if isinstance(y, tuple) else (y,)
        sizes.add(sum(part.numel() for part in parts))
        return torch.stack([part.abs().max() for part in parts if part.numel()]).max()

    block, x = NeuralODE(Net(), **{**TIGHT, where: {"norm": norm}}), batch(B)
    out = block(x)
    out.square().sum().backward()
    sizes.clear()
    given = {0: 2 * out.detach()}
    calls = block.layer_calls(Execution((x,), {}, {0: out.detach()}, given), {"field.one": block.field.one})
    assert sizes <= {x.numel()}
    plain = inner_calls(NeuralODE(Net(), **TIGHT), x)
    for mine, wanted in zip(calls["field.one"], plain["field.one"], strict=True):
        assert torch.allclose(mine.h, wanted.h, rtol=1e-6, atol=1e-9)


def test_four_nodes_beat_a_hundred_uniform_samples() -> None:
    found, dense = factors("adjoint", nodes=4)
    for name, pair in found.items():
        for which, factor in enumerate(pair):
            exact = dense.simpson(name, which)
            four, hundred = error(factor, exact), error(dense.uniform(name, which, 100), exact)
            assert four < 1e-4
            assert four < hundred / 10


class Still(nn.Module):
    """Constant in time and in the state: every evaluation of the layer is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        given = torch.arange(2.0 * len(x), dtype=x.dtype).view(len(x), 2).sin()
        out: Tensor = self.layer(given)
        return out


@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_the_product_of_the_factors_grows_as_the_square_of_time(method: str) -> None:
    products = {}
    for length in (1.0, 3.0):
        model = network(NeuralODE(Still(), t=(0.0, length), solver=method, options=options_of(method)))
        opt = optimizer(model)
        torch.nn.init.ones_(model[3].weight)  # the adjoint at the end of the solve is 2, whatever its length
        out = model(batch(B))
        out.backward(torch.ones_like(out))
        opt.step()
        state = opt.state[model[2].field.layer.weight]
        products[length] = torch.kron(state["output_factor"][0], state["input_factor"][0])
    assert torch.allclose(products[3.0], 9 * products[1.0], rtol=1e-9)
    # the one-layer factors: the layer called once, with the adjoint of the output
    given = torch.arange(2.0 * B, dtype=torch.float64).view(B, 2).sin()
    z = torch.cat([given, torch.ones(B, 1, dtype=torch.float64)], 1)
    h = B * torch.full((B, 3), 2.0, dtype=torch.float64)
    assert torch.allclose(products[1.0], torch.kron(h.T @ h / B, z.T @ z / B), rtol=1e-9)


# --- gradients of single samples ---


def assert_gradients_add_up(block: NeuralODE, calls: dict[str, list[Call]], tolerance: float = 1e-6) -> None:
    assert calls
    for path, each in calls.items():
        adapter, _ = layers.find(block.get_submodule(path))
        assert adapter is not None
        total: dict[str, Tensor] = {}
        for call in each:
            for name, g in adapter.group_gradients(call, Groups(call.batch, 1)).items():
                total[name] = total.get(name, 0) + call.duration * g[0]
        for name, p in adapter.parameters(block.get_submodule(path)).items():
            assert torch.allclose(total[name], p.grad, rtol=tolerance, atol=tolerance * float(p.grad.abs().max()))


class Doubled(nn.Module):
    """A tuple as state, one layer used twice, in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()

    def forward(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = state
        a = nn.functional.softplus(self.one(x)).tanh_()
        return self.two(self.one(a).tanh_()), (y * a).sum(1, keepdim=True).expand_as(y)


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return TimeSequential(
        nn.GroupNorm(1, 2), nn.Softplus(), ConcatConv2d(2, 3, padding=1), nn.Tanh(), ConcatConv2d(3, 2, 1)
    ).double()


def squashed() -> nn.Module:
    torch.manual_seed(0)
    return TimeSequential(ConcatSquashLinear(3, 4), nn.Tanh(), ConcatSquashLinear(4, 3)).double()


@pytest.mark.parametrize(
    ("field", "x", "options"),
    [
        (Net, batch(B), {}),
        (Net, batch(B), {"gradient": "discretize"}),
        (Net, batch(B), {"solver": "rk4", "options": {"step_size": 0.02}}),
        (Net, batch(B), {"solver": "implicit_adams", "options": {"step_size": 0.02}}),
        (Net, batch(B), {"t": (1.0, 0.2)}),
        (Net, batch(B), {"t": (0.0, 0.3, 1.2), "all_times": True}),
        (Net, batch(B), {"t": (1.0, 0.3, 0.0), "all_times": True, "gradient": "discretize"}),
        (Doubled, (batch(B), batch(B, seed=2)), {}),
        (convolutional, batch(B, 18).view(B, 2, 3, 3), {}),
        (squashed, batch(B), {"t": (0.0, 0.7)}),
    ],
    ids=["adjoint", "discretize", "rk4", "adams", "reversed", "all-times", "all-reversed", "tuple", "conv", "squash"],
)
def test_the_calls_add_up_to_the_gradient(field: Callable[[], nn.Module], x: Any, options: dict[str, Any]) -> None:
    block = NeuralODE(field(), nodes=8, **{**TIGHT, **options})
    weigh = None if not isinstance(x, tuple) else lambda out: out[0].square().sum() + (out[1] ** 3).sum()
    assert_gradients_add_up(block, inner_calls(block, x, weigh))


def test_second_moments_are_those_of_single_samples() -> None:
    model = network(NeuralODE(Net(), nodes=8, **TIGHT))
    opt, x = optimizer(model), batch(B)
    single = []
    for row in x:
        model.zero_grad()
        loss_of(model, row[None]).backward()
        single.append([p.grad.clone() for p in model[2].field.one.parameters()])
    opt.zero_grad()
    loss_of(model, x).backward()
    opt.step()
    state = opt.state[model[2].field.one.weight]
    U_A, U_C = state["input_basis"][0], state["output_basis"][0]
    rotated = [U_C.T @ torch.cat([w, b[:, None]], 1) @ U_A for w, b in single]
    wanted = torch.stack(rotated).square().mean(0)
    assert torch.allclose(state["eigenvalues"][0], wanted, rtol=1e-5, atol=1e-8 * float(wanted.max()))


def test_batch_statistics_and_random_numbers_are_left_alone() -> None:
    torch.manual_seed(0)
    field = TimeSequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.Tanh()).double()
    model = network(NeuralODE(field, solver="rk4", options={"step_size": 0.5}))
    opt = optimizer(model)
    loss_of(model, batch(B)).backward()
    count, mean, random = field[1].num_batches_tracked.clone(), field[1].running_mean.clone(), torch.get_rng_state()
    opt.step()
    assert torch.equal(random, torch.get_rng_state())
    assert model[2].nfe.curvature > 0
    assert torch.equal(count, field[1].num_batches_tracked)
    assert torch.equal(mean, field[1].running_mean)


def test_the_quadrature_is_exact_for_polynomials() -> None:
    for n in range(1, 9):
        for degree in range(2 * n):
            found = sum(w * s**degree for s, w in gauss_legendre(n))
            assert found == pytest.approx(1 / (degree + 1), rel=1e-12)

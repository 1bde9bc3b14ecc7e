"""NeuralODE: what it returns, its gradients, and what it refuses."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from tests.ode.fields import METHODS, Decay, Net, Pair, batch, options_of
from torch import Tensor, nn
from torchdiffeq import odeint

from ocnopt.ode import NeuralODE, SolverError

TIGHT = {"rtol": 1e-10, "atol": 1e-10}
DISCRETISED = [m for m in METHODS if m != "scipy_solver"]


def gradients(block: NeuralODE, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = x.clone().requires_grad_()
    out = block(x)
    grads = torch.autograd.grad(out.square().sum(), [x, *block.parameters()])
    return out.detach(), list(grads)


@pytest.mark.parametrize("method", METHODS)
def test_every_solver_finds_the_exact_solution(method: str) -> None:
    block = NeuralODE(Decay(), t=(0.0, 0.7), solver=method, options=options_of(method, 0.02), rtol=1e-6, atol=1e-6)
    x = batch()
    tolerance = 3e-2 if method in ("euler", "explicit_adams") else 2e-3
    assert torch.allclose(block(x), block.field.exact(x, 0.7), rtol=tolerance)


@pytest.mark.parametrize("method", DISCRETISED)
def test_the_two_gradients_agree(method: str) -> None:
    made = [
        NeuralODE(Net(), solver=method, options=options_of(method), gradient=g, rtol=1e-6, atol=1e-6)
        for g in ("adjoint", "discretize")
    ]
    (out, found), (same, exact) = (gradients(block, batch()) for block in made)
    assert torch.equal(out, same)
    tolerance = 0.1 if method in ("euler", "explicit_adams") else 1e-3
    for g, e in zip(found, exact, strict=True):
        assert torch.allclose(g, e, rtol=tolerance, atol=tolerance * float(e.abs().max()))


def test_the_gradient_is_that_of_torchdiffeq_bit_for_bit() -> None:
    from torchdiffeq import odeint_adjoint

    field, x = Net(), batch().requires_grad_()
    times = torch.tensor([0.0, 1.0], dtype=torch.float64)
    for gradient, solve in (("adjoint", odeint_adjoint), ("discretize", odeint)):
        theirs = solve(field, x, times, rtol=1e-5, atol=1e-5, method="dopri5")[-1]
        wanted = torch.autograd.grad(theirs.square().sum(), [x, *field.parameters()])
        out, found = gradients(NeuralODE(field, gradient=gradient), x.detach())
        assert torch.equal(out, theirs)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("gradient", ["adjoint", "discretize"])
def test_tuple_states_and_all_times(gradient: str) -> None:
    block = NeuralODE(Pair(), t=(0.0, 0.3, 1.0), gradient=gradient, **TIGHT)
    x, clock = batch(4, 2), torch.zeros(4, dtype=torch.float64)
    last = block((x, clock))
    assert isinstance(last, tuple)
    states, clocks = block((x, clock), all_times=True)
    assert states.shape == (3, 4, 2)
    assert torch.equal(states[0], x)
    assert torch.allclose(clocks, torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)[:, None].expand(3, 4))
    assert torch.allclose(states[-1], last[0])
    angle = torch.tensor(0.6, dtype=torch.float64)
    turned = torch.stack([x[:, 0] * angle.cos() - x[:, 1] * angle.sin()], 1)
    assert torch.allclose(states[1, :, :1], turned)
    loss = states[1].square().sum() + (states[2] ** 3).sum() + clocks.sum()
    (found,) = torch.autograd.grad(loss, [block.field.omega])
    eps = 1e-6
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            block.field.omega += sign * eps
            s, c = block((x, clock), all_times=True)
            values.append(s[1].square().sum() + (s[2] ** 3).sum() + c.sum())
            block.field.omega -= sign * eps
    assert torch.allclose(found, (values[0] - values[1]) / (2 * eps), rtol=1e-6)


def test_all_times_may_be_a_setting_of_the_block_and_times_given_with_the_call() -> None:
    block = NeuralODE(Decay(), all_times=True, **TIGHT)
    x = batch()
    assert block(x).shape == (2, *x.shape)
    assert block(x, all_times=False).shape == x.shape
    assert torch.allclose(block(x, t=(0.0, 0.2), all_times=False), block.field.exact(x, 0.2))
    back = block(block(x, all_times=False), t=(1.0, 0.0), all_times=False)
    assert torch.allclose(back, x)


# --- checkpoints ---


@pytest.mark.parametrize("method", ["rk4", "euler", "midpoint", "heun3"])
@pytest.mark.parametrize("t", [(0.0, 1.0), (1.0, 0.0), (0.0, 0.21, 0.5, 0.55, 1.0)])
def test_checkpoints_change_nothing_on_a_fixed_grid(method: str, t: tuple[float, ...]) -> None:
    field, x = Net(), batch()
    plain = NeuralODE(field, t=t, solver=method, options={"step_size": 0.1}, gradient="discretize")
    cut = NeuralODE(field, t=t, solver=method, options={"step_size": 0.1}, gradient="discretize", checkpoints=3)
    (out, wanted), (same, found) = gradients(plain, x), gradients(cut, x)
    assert torch.allclose(out, same, rtol=1e-12)
    assert all(torch.allclose(a, b, rtol=1e-11) for a, b in zip(wanted, found, strict=True))
    assert torch.allclose(plain(x, all_times=True), cut(x, all_times=True), rtol=1e-12)
    assert cut.nfe.backward > 0
    assert plain.nfe.backward == 0


def test_checkpoints_with_an_adaptive_solver_agree_to_tolerance() -> None:
    field, x = Net(), batch()
    plain = NeuralODE(field, t=(0.0, 0.4, 2.0), gradient="discretize", **TIGHT)
    cut = NeuralODE(field, t=(0.0, 0.4, 2.0), gradient="discretize", checkpoints=4, **TIGHT)
    (out, wanted), (same, found) = gradients(plain, x), gradients(cut, x)
    assert torch.allclose(out, same, rtol=1e-8)
    assert all(torch.allclose(a, b, rtol=1e-7) for a, b in zip(wanted, found, strict=True))
    assert torch.allclose(plain(x, all_times=True), cut(x, all_times=True), rtol=1e-8)


def test_checkpoints_on_the_times_themselves() -> None:
    field, x, t = Net(), batch(), tuple(k / 8 for k in range(9))
    plain = NeuralODE(field, t=t, solver="rk4", gradient="discretize")
    cut = NeuralODE(field, t=t, solver="rk4", gradient="discretize", checkpoints=3)
    assert torch.allclose(plain(x, all_times=True), cut(x, all_times=True), rtol=1e-12)


@pytest.mark.parametrize("t", [(0.0, 1.0), (1.0, 0.0), (0.0, 2.1), (0.0, 0.7, 1.0), (0.0, 0.5)])
def test_checkpoints_never_add_a_step(t: tuple[float, ...]) -> None:
    field, x = Net(), batch()
    solve = {"solver": "euler", "options": {"step_size": 0.7}, "gradient": "discretize"}
    plain, cut = NeuralODE(field, t=t, **solve), NeuralODE(field, t=t, checkpoints=5, **solve)
    assert torch.allclose(plain(x, all_times=True), cut(x, all_times=True), rtol=1e-12)
    assert plain.nfe.forward == cut.nfe.forward


@pytest.mark.parametrize("solve", [{}, {"solver": "rk4", "options": {"step_size": 0.1}}])
def test_borders_that_are_times_in_single_precision(solve: dict[str, Any]) -> None:
    field, x, t = Net().float(), batch().float(), (0.0, *(k / 10 for k in range(1, 10)), 0.9 + 0.1)
    plain = NeuralODE(field, t=t, gradient="discretize", **solve)
    cut = NeuralODE(field, t=t, gradient="discretize", checkpoints=10, **solve)
    assert torch.allclose(plain(x, all_times=True), cut(x, all_times=True), rtol=1e-3, atol=3e-4)


class Held:
    """How many bytes autograd keeps for the backward pass."""

    def __init__(self) -> None:
        self.bytes = 0

    def pack(self, t: Tensor) -> Tensor:
        self.bytes += t.numel() * t.element_size()
        return t


def kept(block: NeuralODE, x: Tensor) -> int:
    held = Held()
    with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda t: t):
        out = block(x)
    del out
    gc.collect()
    return held.bytes


def test_memory_does_not_grow_with_the_steps_of_the_adjoint_nor_much_between_checkpoints() -> None:
    field, x = Net(), batch().requires_grad_()
    coarse, fine = ({"step_size": s} for s in (0.1, 0.0125))
    solve = {"solver": "rk4"}
    adjoint = [kept(NeuralODE(field, options=o, **solve), x) for o in (coarse, fine)]
    whole = [kept(NeuralODE(field, options=o, gradient="discretize", **solve), x) for o in (coarse, fine)]
    cut = [kept(NeuralODE(field, options=o, gradient="discretize", checkpoints=2, **solve), x) for o in (coarse, fine)]
    assert adjoint[0] == adjoint[1]
    assert whole[1] > 7 * whole[0]
    assert cut[0] == cut[1]


# --- counting, copies ---


def test_evaluations_are_counted() -> None:
    block = NeuralODE(Net(), solver="rk4", options={"step_size": 0.1})
    out = block(batch().requires_grad_())
    assert (block.nfe.forward, block.nfe.backward) == (40, 0)
    out.sum().backward()
    assert (block.nfe.forward, block.nfe.backward) == (40, 40)
    with torch.no_grad():
        block(batch())
    assert block.nfe.forward == 80
    block.nfe.reset()
    assert (block.nfe.forward, block.nfe.backward) == (0, 0)


def test_the_seminorm_saves_evaluations() -> None:
    nfe = []
    for options in (None, {"norm": "seminorm"}):
        block = NeuralODE(Net(hidden=32), t=(0.0, 4.0), adjoint_options=options, rtol=1e-9, atol=1e-9)
        block(batch()).square().sum().backward()
        nfe.append(block.nfe.backward)
    assert nfe[1] < nfe[0]


def test_copies_and_pickles_solve_the_same() -> None:
    block = NeuralODE(Net(), options={"min_step": 1e-6})
    x, saved = batch(), io.BytesIO()
    torch.save(block, saved)
    saved.seek(0)
    for other in (copy.deepcopy(block), torch.load(saved, weights_only=False)):
        assert torch.equal(other(x), block(x))
    fresh = NeuralODE(Net(seed=5))
    fresh.load_state_dict(block.state_dict())
    assert torch.equal(fresh(x), NeuralODE(block.field)(x))


def test_autocast_is_restored_in_the_adjoint_solve() -> None:
    seen = []

    class Spy(Net):
        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(t, x)

    block = NeuralODE(Spy().float(), rtol=1e-3, atol=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        out = block(batch().float())
    assert out.dtype == torch.float32
    forward = len(seen)
    out.sum().backward()
    assert len(seen) > forward
    assert all(seen)


def test_the_output_may_be_changed_in_place() -> None:
    block = NeuralODE(Net())
    (block(batch()) * 1.0).relu_().sum().backward()
    wanted = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    block(batch()).relu_().sum().backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(block.parameters(), wanted, strict=True))


def test_frozen_parameters_get_no_gradient() -> None:
    block = NeuralODE(Net())
    block.field.one.requires_grad_(False)
    block(batch()).sum().backward()
    assert block.field.one.weight.grad is None
    assert block.field.two.weight.grad is not None


# --- failures ---


class Explodes(nn.Module):
    """From 1 the state is infinite at t = (1 − 1/e)/2, and no solver gets there."""

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return x * x / (x.detach() * 0 + (0.5 - t))


class TurnsBad(nn.Module):
    def __init__(self, when: float = 0.4) -> None:
        super().__init__()
        self.when, self.scale = when, nn.Parameter(torch.ones(()))

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return torch.where(t > self.when, torch.full_like(x, float("nan")), self.scale * x)


def test_an_underflow_of_the_step_names_block_time_and_remedies() -> None:
    block = NeuralODE(Explodes())
    with pytest.raises(
        SolverError, match=r"NeuralODE\(Explodes\): the forward solve failed at t = 0\.3.*underflow.*rtol"
    ):
        block(torch.ones(2, 2))
    block.known_as = "features.3"
    with pytest.raises(SolverError, match=r"^features\.3: .*min_step.*rk4"):
        block(torch.ones(2, 2))


@pytest.mark.filterwarnings("ignore:Functional iteration did not converge")  # torchdiffeq's, on its way to the error
@pytest.mark.parametrize("method", ["dopri5", "rk4", "implicit_adams"])
@pytest.mark.parametrize("gradient", ["adjoint", "discretize"])
def test_a_field_that_is_not_finite_is_found_at_its_time(method: str, gradient: str) -> None:
    block = NeuralODE(TurnsBad(), solver=method, options=options_of(method), gradient=gradient)
    with pytest.raises(SolverError, match=r"the forward solve failed at t = 0\.4.*the field is not finite"):
        block(torch.ones(2, 2))


def test_a_state_that_is_not_finite_is_refused() -> None:
    for method in ("dopri5", "rk4"):
        block = NeuralODE(Decay().float(), solver=method, options=options_of(method))
        with pytest.raises(SolverError, match="not finite"):
            block(torch.tensor([[1.0, float("inf")]]))


@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_an_adjoint_solve_that_fails_is_named_too(method: str) -> None:
    class BadGradient(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            # the derivative of sqrt at 0 is infinite, and 0 · inf is not a number
            return self.scale * x + torch.where(t < 0.5, (x * 0).sqrt(), torch.zeros_like(x))

    block = NeuralODE(BadGradient(), solver=method, options=options_of(method))
    out = block(torch.ones(2, 2))
    with pytest.raises(SolverError, match=r"NeuralODE\(BadGradient\): the adjoint solve failed"):
        out.sum().backward()


@pytest.mark.parametrize("method", ["dopri5", "rk4"])
def test_a_loss_that_is_not_finite_is_not_a_failure_of_the_solver(method: str) -> None:
    block, x = NeuralODE(Net(), solver=method, options=options_of(method)), batch().requires_grad_()
    (block(x).sum() * float("inf")).backward()
    assert not any(p.grad.isfinite().any() for p in (x, *block.parameters()))


def test_an_assertion_of_the_field_stays_what_it_is() -> None:
    class Asserts(nn.Module):
        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            raise AssertionError("mine")

    with pytest.raises(AssertionError, match="mine"):
        NeuralODE(Asserts())(batch())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"field": lambda t, x: x}, TypeError, "field must be a torch.nn.Module"),
        ({"solver": "rk45"}, ValueError, "solver must be one of .*'dopri5'.*got 'rk45'"),
        ({"adjoint_solver": "rk45"}, ValueError, "adjoint_solver must be one of"),
        ({"gradient": "adjoints"}, ValueError, "gradient must be one of 'adjoint', 'discretize'"),
        ({"rtol": 0.0}, ValueError, "rtol must be a number > 0, got 0.0"),
        ({"atol": True}, ValueError, "atol must be a number > 0"),
        ({"adjoint_rtol": -1.0}, ValueError, "adjoint_rtol must be a number > 0"),
        ({"t": (0.0,)}, ValueError, "t must be at least two finite times"),
        ({"t": (0.0, 1.0, 1.0)}, ValueError, "strictly increasing or strictly decreasing"),
        ({"t": (0.0, 1.0, 0.5)}, ValueError, "strictly increasing or strictly decreasing"),
        ({"t": (0.0, float("inf"))}, ValueError, "finite times"),
        ({"t": "ab"}, ValueError, "t must be a sequence of numbers"),
        ({"t": torch.ones(2, requires_grad=True)}, ValueError, "learn_horizon"),
        ({"checkpoints": 3}, ValueError, "checkpoints are for gradient='discretize'"),
        ({"checkpoints": 0, "gradient": "discretize"}, ValueError, "checkpoints must be a whole number ≥ 1, got 0"),
        (
            {"checkpoints": 3, "gradient": "discretize", "solver": "rk4"},
            ValueError,
            "checkpoints=3 needs at least as many steps.*1 in all",
        ),
        (
            {"checkpoints": 2, "gradient": "discretize", "solver": "rk4", "options": {"grid_constructor": len}},
            ValueError,
            "grid_constructor",
        ),
        ({"solver": "scipy_solver", "gradient": "discretize"}, ValueError, "needs gradient='adjoint'"),
        ({"gradient": "discretize", "adjoint_rtol": 1e-3}, ValueError, "adjoint_rtol is about the adjoint solve"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NeuralODE(**{"field": Decay(), **arguments})


def test_wrong_states_and_fields() -> None:
    with pytest.raises(TypeError, match="the state must be a floating-point tensor or a tuple of them, got list"):
        NeuralODE(Decay())([batch()])
    with pytest.raises(TypeError, match="floating-point"):
        NeuralODE(Decay())(torch.ones(2, 2, dtype=torch.long))

    class Wide(nn.Module):
        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            return torch.cat([x, x], 1)

    with pytest.raises(ValueError, match=r"field Wide must return dx/dt in the shape of x, \[\(5, 3\)\], got"):
        NeuralODE(Wide())(batch())

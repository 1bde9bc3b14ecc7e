"""The look along a solve repeats what the call did, in the same mode and precision, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.ode.fields import TIGHT, Net, batch, inner_calls, loss_of, network, optimizer
from tests.ode.test_curvature import assert_gradients_add_up
from torch import Tensor, nn

from ocnopt.hosts import CannotTell
from ocnopt.ode import Evaluations, NeuralODE
from ocnopt.ode.field import Field
from ocnopt.ode.look import Adjoint, observe
from ocnopt.ode.strays import Strays

B = 5
FEW: dict[str, Any] = {"solver": "rk4", "options": {"step_size": 0.25}}


# --- pieces of a trajectory ---


class Pieces(nn.Module):
    """One trajectory, solved in one call, at several times in one call, or in as many calls."""

    def __init__(self, how: str, field: nn.Module) -> None:
        super().__init__()
        self.how, self.ode = how, NeuralODE(field, nodes=8, **TIGHT)
        self.head = nn.Linear(3, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        times = (0.0, 0.2, 0.9, 1.2)
        if self.how == "times":
            x = self.ode(x, t=times, all_times=True)[-1]
        elif self.how == "calls":
            for start, end in pairwise(times):
                x = self.ode(x, t=(start, end))
        else:
            x = self.ode(x, t=(times[0], times[-1]))
        out: Tensor = self.head(x)
        return out


class Twice(Net):
    """Its layers are used at two positions of every sample."""

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        clock = t.expand(len(x), 2, 1)
        pair = torch.stack([x, x.flip(1)], 1)
        out: Tensor = self.two(torch.tanh(self.one(torch.cat([pair, clock], 2)))).sum(1)
        return out


@pytest.mark.parametrize("field", [Net, Twice])
@pytest.mark.parametrize("ekfac", [False, True])
@pytest.mark.parametrize("how", ["times", "calls"])
def test_factors_do_not_depend_on_how_a_trajectory_is_cut(
    how: str, ekfac: bool, field: Callable[[], nn.Module]
) -> None:
    states = []
    for cut in ("whole", how):
        torch.manual_seed(3)
        model = Pieces(cut, field())
        opt = optimizer(model, ekfac=ekfac)
        loss_of(model, batch(B)).backward()
        opt.step()
        states.append(opt.state[model.ode.field.one.weight])
    for key in ("input_factor", "output_factor", "eigenvalues"):
        size = float(states[0][key].abs().max())
        assert torch.allclose(states[0][key], states[1][key], rtol=1e-5, atol=1e-6 * size), key


# --- blocks inside fields ---


class Nested(nn.Module):
    """A field that solves another block at each evaluation."""

    def __init__(self, **inner: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = NeuralODE(Net(), t=(0.0, 0.4), nodes=8, **TIGHT, **inner), nn.Linear(3, 3).double()

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.inner(x)))
        return out


@pytest.mark.parametrize("inner", [{"gradient": "adjoint"}, {"gradient": "discretize"}])
def test_a_block_inside_a_field_tells_what_its_own_layers_saw(inner: dict[str, Any]) -> None:
    block = NeuralODE(Nested(**inner), nodes=8, rtol=1e-8, atol=1e-8)
    calls = inner_calls(block, batch(B))
    assert set(calls) == {"field.inner.field.one", "field.inner.field.two", "field.last"}
    assert [len(each) for each in calls.values()] == [64, 64, 8]
    assert_gradients_add_up(block, calls, 1e-5)
    assert all(sum(call.share for call in each) == pytest.approx(1.0) for each in calls.values())


def test_a_block_inside_a_field_gets_curvature() -> None:
    model = network(NeuralODE(Nested(), rtol=1e-4, atol=1e-4))
    opt = optimizer(model)
    loss_of(model, batch(B)).backward()
    opt.step()
    state = opt.state[model[2].field.inner.field.one.weight]
    assert torch.linalg.eigvalsh(state["output_factor"][0]).max() > 0
    assert "adaptive" not in opt.summary()


# --- as in the call ---


class Spy(Net):
    """Notes how it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.seen: list[tuple[bool, bool, float]] = []

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        self.seen.append((self.training, torch.is_autocast_enabled("cpu"), float(torch.rand(()))))
        return super().forward(t, x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_the_look_has_the_mode_and_the_precision_of_the_call(training: bool, autocast: bool) -> None:
    block = NeuralODE(Spy().float(), **FEW)
    opt = optimizer(block)
    block.train(training)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = block(batch(B).float())
    out.square().sum().backward()
    block.train(not training)
    block.field.seen.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=not autocast):
        opt.step()
    looked = block.field.seen[-block.nfe.curvature :]  # what comes before is the probe of samples
    assert {seen[:2] for seen in looked} == {(training, autocast)}
    assert block.training is block.field.training is block.field.drop.training is not training


def test_every_evaluation_of_a_look_draws_the_same_random_numbers() -> None:
    block = NeuralODE(Spy(), **FEW)
    out = block(batch(B))
    block.field.seen.clear()
    before = torch.get_rng_state()
    inner_calls(block, batch(B))
    looked = block.field.seen[-block.nfe.curvature :]
    assert len(looked) > 20
    assert len({number for *_, number in looked}) == 1
    assert not torch.equal(before, torch.get_rng_state())  # which the forward solve has drawn
    assert out.isfinite().all()


def test_a_field_with_random_numbers_is_halved_once() -> None:
    class Noisy(Net):
        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            return super().forward(t, x) + 3 * torch.randn_like(x)

    counts = {}
    for field in (Net(), Noisy()):
        torch.manual_seed(4)
        block = NeuralODE(field, gradient="discretize", **FEW)
        inner_calls(block, batch(B))
        counts[type(field)] = block.nfe.curvature
    assert counts[Net] < counts[Noisy] <= 4 * counts[Net]


def test_a_field_that_draws_too_much_is_not_known_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noisy(Net):
        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            return super().forward(t, x) + 30 * torch.randn_like(x)

    monkeypatch.setattr("ocnopt.ode.look._HALVINGS", 0)
    with pytest.raises(CannotTell, match="cannot be solved backward"):
        inner_calls(NeuralODE(Noisy(), gradient="discretize", **FEW), batch(B))


@pytest.mark.parametrize("gradient", ["adjoint", "discretize"])
def test_the_look_solves_with_the_tolerances_of_the_adjoint(gradient: str) -> None:
    nfe = []
    for tight in (False, True):
        adjoint = {"adjoint_rtol": 1e-10, "adjoint_atol": 1e-10} if tight and gradient == "adjoint" else {}
        loose = 1e-10 if tight and gradient == "discretize" else 1e-3
        block = NeuralODE(Net(), gradient=gradient, rtol=loose, atol=loose, **adjoint)
        inner_calls(block, batch(B))
        nfe.append(block.nfe)
    assert nfe[1].curvature > 2 * nfe[0].curvature
    if gradient == "adjoint":
        assert nfe[1].forward == nfe[0].forward
        assert nfe[1].backward > 2 * nfe[0].backward


def test_tighter_tolerances_of_the_adjoint_make_a_better_gradient() -> None:
    errors, exact = [], None
    for arguments in (
        TIGHT,
        {"adjoint_rtol": 1e-1, "adjoint_atol": 1e-1},
        {"adjoint_rtol": 1e-9, "adjoint_atol": 1e-9},
    ):
        block = NeuralODE(Net(), t=(0.0, 4.0), **{"rtol": 1e-8, "atol": 1e-8, **arguments})
        block(batch(B)).square().sum().backward()
        grad = block.field.one.weight.grad
        exact = grad if exact is None else exact
        errors.append(float((grad - exact).norm() / exact.norm()))
    assert errors[2] < 1e-5 < 1e-3 < errors[1]


# --- nothing is held ---


def test_no_graph_is_held_and_nothing_is_marked() -> None:
    pair, x, q = Adjoint(Field(Net(), Evaluations(), Strays()), tupled=False), batch(B), batch(B, seed=2)
    t = torch.tensor(0.3, dtype=torch.float64)
    with torch.enable_grad():
        speed, slope = pair(t, (x, q))
        assert not speed.requires_grad
        assert not slope.requires_grad
        field = pair.F.module
        for _, call in observe(pair, t, (x, q), {"one": field.one, "two": field.two}):
            assert not call.x.requires_grad
            assert not call.h.requires_grad
    assert not x.requires_grad
    assert not q.requires_grad
    assert x.grad is q.grad is None
    assert all(p.grad is None for p in pair.F.module.parameters())

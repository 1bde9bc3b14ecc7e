"""A block as the engine sees it: one stage, curvature on refresh steps, solves that fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ode.fields import TIGHT, Net, batch, inner_calls, loss_of, network, optimizer
from torch import Tensor, nn

from ocnopt import OCNOpt
from ocnopt.hosts import CannotTell
from ocnopt.ode import NeuralODE, SolverError
from ocnopt.ode.quadrature import gauss_legendre

B = 5


def test_the_block_is_one_stage_and_its_layers_are_known_by_their_own_names() -> None:
    model = network(NeuralODE(Net()))
    opt = optimizer(model, feedback="linear")
    loss_of(model, batch(B)).backward()
    opt.step()
    rows = {line.split()[0]: line.split() for line in opt.summary().splitlines() if line[:1].isdigit()}
    assert {n: r[2] for n, r in rows.items() if "." in n} == {"2.field.one": "kronecker", "2.field.two": "kronecker"}
    assert model[2].known_as == "2"
    assert rows["0"][3] < rows["2.field.one"][3] == rows["2.field.two"][3] < rows["3"][3]


def test_a_field_that_the_model_holds_twice() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.func = Net()
            self.ode = NeuralODE(self.func)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.ode(x)
            return out

    model = Model()
    opt = optimizer(model)
    loss_of(model, batch(B)).backward()
    opt.step()
    assert "input_factor" in opt.state[model.func.one.weight]


def test_feedback_is_off_by_default_where_there_is_a_block() -> None:
    model = network(NeuralODE(Net()))
    assert OCNOpt(model.parameters(), model=model, curvature="kronecker").param_groups[0]["feedback"] == "off"
    assert OCNOpt(model.parameters(), model=model, feedback="linear").param_groups[0]["feedback"] == "linear"
    plain = nn.Linear(2, 2)
    assert OCNOpt(plain.parameters(), model=plain).param_groups[0]["feedback"] == "linear"


@pytest.mark.parametrize(
    "asked",
    [
        {"rank": 4},
        {"gauss_newton": 2.0},
        {"bellman": "paper"},
        {"clamp": False},
        {"game": "noncooperative"},
        {"alignment": "last", "bellman": "paper"},
    ],
)
def test_who_asks_for_a_game_gets_one(asked: dict[str, Any]) -> None:
    model = network(NeuralODE(Net()))
    opt = OCNOpt(model.parameters(), model=model, **asked)
    assert opt.param_groups[0]["feedback"] == "linear"
    assert set(opt.defaults) == set(OCNOpt(model.parameters()).defaults)
    assert OCNOpt(model.parameters(), model=model).param_groups[0]["feedback"] == "off"


def test_factors_every_few_steps_and_nothing_is_kept_in_between() -> None:
    model = network(NeuralODE(Net())).append(nn.LayerNorm(2).double())  # which has no factors and never asks for calls
    opt, changed, kept = optimizer(model, refresh_every=4, factor_every=2), [], []
    layers = (model[0], model[2].field.one)
    for i in range(18):
        before = [opt.state[layer.weight].get("input_factor", torch.zeros(())).clone() for layer in layers]
        opt.zero_grad()
        loss_of(model, batch(B, seed=i)).backward()
        kept.append(len(opt._tape.records) > 0)
        opt.step()
        after = [opt.state[layer.weight]["input_factor"] for layer in layers]
        changed.append([not torch.equal(a, b) for a, b in zip(before, after, strict=True)])
    outside, inside = ([i for i, looked in enumerate(each, 1) if looked] for each in zip(*changed, strict=True))
    assert inside == [1, 2, 3, 4, 6, 9, 13, 17]  # refreshes, the first of which follow each other quickly
    assert outside == [1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18]  # and every second step
    assert [i for i, something in enumerate(kept, 1) if something] == sorted({*inside, *outside})
    assert [line.split()[0] for line in opt.summary().splitlines() if "adaptive" in line] == ["4.weight", "4.bias"]


def test_more_passes_in_a_step_count_as_more_samples() -> None:
    whole, parts = network(NeuralODE(Net(), **TIGHT)), network(NeuralODE(Net(), **TIGHT))
    x, made = batch(6), [optimizer(m) for m in (whole, parts)]
    loss_of(whole, x).backward()
    for part in x.split(3):
        (loss_of(parts, part) / 2).backward()
    for opt in made:
        opt.step()
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-6, atol=1e-9)


def test_a_checkpoint_continues_bit_for_bit(tmp_path: Any) -> None:
    def steps(model: nn.Module, opt: OCNOpt, first: int, last: int) -> None:
        for i in range(first, last):
            opt.zero_grad()
            loss_of(model, batch(B, seed=i)).backward()
            opt.step()

    one, two = network(NeuralODE(Net())), network(NeuralODE(Net()))
    straight, fresh = optimizer(one, refresh_every=3), optimizer(two, refresh_every=3)
    steps(one, straight, 0, 2)
    torch.save({"model": one.state_dict(), "opt": straight.state_dict()}, tmp_path / "c.pt")
    saved = torch.load(tmp_path / "c.pt", weights_only=True)
    two.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["opt"])
    steps(one, straight, 2, 8)
    steps(two, fresh, 2, 8)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


class Fragile(Net):
    """Fails when it is evaluated for curvature, as a solve may."""

    fails = False

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        out = super().forward(t, x)
        return out * float("nan") if self.fails else out


def test_a_solve_that_fails_keeps_the_old_curvature_and_says_so() -> None:
    model = network(NeuralODE(Fragile()))
    opt = optimizer(model, refresh_every=2)
    for i in range(4):
        opt.zero_grad()
        loss_of(model, batch(B)).backward()
        model[2].field.fails = i == 2
        if i == 2:
            basis = opt.state[model[2].field.one.weight]["input_basis"].clone()
            with pytest.warns(UserWarning, match="2: what its layers saw is not known: 2: the curvature solve failed"):
                opt.step()
            assert torch.equal(basis, opt.state[model[2].field.one.weight]["input_basis"])
        else:
            opt.step()
        model[2].field.fails = False
    assert all(p.isfinite().all() for p in model.parameters())
    assert not torch.equal(basis, opt.state[model[2].field.one.weight]["input_basis"])


class Contracting(nn.Module):
    """x runs after a moving target at the rate k: errors grow by e^{kT} when it is solved backward."""

    def __init__(self, k: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.k, self.one = k, nn.Linear(3, 3).double()

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.k * (torch.tanh(self.one(x)) - x + torch.sin(3 * t))


@pytest.mark.parametrize(("k", "dtype", "nodes"), [(15.0, torch.float64, 4), (30.0, torch.float32, 3)])
@pytest.mark.parametrize("solve", [{"solver": "rk4", "options": {"step_size": 0.01}}, {"rtol": 1e-6, "atol": 1e-6}])
def test_a_field_that_contracts(k: float, dtype: torch.dtype, nodes: int, solve: dict[str, Any]) -> None:
    """A state may be off by what is let pass, a fiftieth of the way that it comes: how much it is hangs on rounding."""
    field = Contracting(k).to(dtype)
    block = NeuralODE(field, t=(0.0, 2.0), gradient="discretize", nodes=nodes, **solve)
    calls = inner_calls(block, batch(B).to(dtype))["field.one"]
    at = sorted(2.0 * (1 - s) for s, _ in gauss_legendre(nodes))
    with torch.no_grad():
        exact = NeuralODE(field.double(), **TIGHT)(batch(B), t=(0.0, *at), all_times=True)[1:].flip(0)
    largest = max(x.norm() for x in (batch(B), *exact))  # no way of an interval is longer than three of these
    for call, wanted in zip(calls, exact, strict=True):
        assert (call.args[0].double() - wanted).norm() <= 0.02 * 3 * largest
        assert call.h.isfinite().all()


class Residual(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += self.block(x)
        return x


def test_an_input_that_is_overwritten_is_not_solved_from() -> None:
    seen = []
    for residual in (True, False):
        block = NeuralODE(Net(), **TIGHT)
        model = Residual(block) if residual else block
        opt = optimizer(model)
        x = batch(B)
        (model(x) + (0 if residual else x)).square().sum().backward()
        opt.step()
        seen.append(opt.state[block.field.one.weight]["input_factor"])
    assert torch.allclose(*seen, rtol=1e-8)


def test_what_contracts_too_strongly_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ocnopt.ode.look._HALVINGS", 0)
    block = NeuralODE(Contracting(30.0), t=(0.0, 2.0), solver="rk4", options={"step_size": 0.02}, gradient="discretize")
    with pytest.raises(CannotTell, match="the field contracts too strongly"):
        inner_calls(block, batch(B))


def test_solver_errors_name_the_block_as_the_model_does() -> None:
    model = network(NeuralODE(Fragile()))
    optimizer(model)
    model[2].field.fails = True
    with pytest.raises(SolverError, match=r"^2: the forward solve failed"):
        model(batch(B))

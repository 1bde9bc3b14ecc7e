"""Mixed precision: the second pass runs under the autocast of the first; what is inverted is kept in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import (
    GAMES,
    SOME_GAMES,
    assert_identical,
    backward,
    batches,
    mlp,
    name_of,
    on_every_call,
    state_of,
    train,
    values,
)
from torch import Tensor, nn

from ocnopt import OCNOpt
from ocnopt.groups import Groups, Part
from ocnopt.readings import Reading
from ocnopt.rollout import Measure

games = pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
NONLINEAR = [g for g in SOME_GAMES if g["feedback"] == "nonlinear"]


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


def data(n: int = 1) -> list[tuple[Tensor, Tensor]]:
    return batches(n, dtype=torch.float32)


def autocast_step(model: nn.Module, opt: OCNOpt, x: Tensor, y: Tensor, inside: bool = False) -> None:
    opt.zero_grad()
    with autocast():
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    with autocast(inside):
        opt.step()


@pytest.mark.parametrize("game", NONLINEAR, ids=name_of)
def test_the_second_pass_is_under_the_same_autocast(game: dict[str, Any]) -> None:
    model = mlp(dtype=torch.float32)
    seen: list[torch.dtype] = []
    on_every_call(model[1][1], lambda out: seen.append(out.dtype))
    opt = OCNOpt(model.parameters(), 0.0, model=model, **game)
    autocast_step(model, opt, *data()[0])
    assert seen[1:], "the second pass"
    assert set(seen) == {torch.bfloat16}
    assert opt.diagnostics.predicted_change == 0.0, "a step of nothing repeats the outputs bit for bit"


@pytest.mark.parametrize("game", NONLINEAR, ids=name_of)
def test_and_without_it_where_the_first_was_without(game: dict[str, Any]) -> None:
    model = mlp(dtype=torch.float32)
    opt = OCNOpt(model.parameters(), 0.0, model=model, **game)
    backward(model, *data()[0])
    with autocast():
        opt.step()
    assert opt.diagnostics.predicted_change == 0.0


@pytest.mark.parametrize("rank", [1, 3])
def test_what_changes_upstream_is_not_measured_in_half_precision(rank: int) -> None:
    """The second pass is under autocast, the sums over its changes are not."""
    measure = Measure(Part(Groups(6, rank), 0, rank), torch.ones(rank), sign=1.0)
    adjoint, before, now = torch.randn(3, 6, 40, generator=torch.Generator().manual_seed(0))
    with autocast():
        found = measure(Reading.of(adjoint, before, 6), now)
    assert_identical(found, measure(Reading.of(adjoint, before, 6), now))


@pytest.mark.parametrize("game", GAMES, ids=name_of)
def test_a_step_inside_autocast_is_the_same_step(game: dict[str, Any]) -> None:
    """Kernels and factors are not rounded to bfloat16 because somebody put the whole loop under autocast."""
    runs = []
    for inside in (False, True):
        model = mlp(dtype=torch.float32)
        opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
        for x, y in data(2):
            autocast_step(model, opt, x, y, inside)
        runs.append((values(model), state_of(opt)))
    assert_identical(*runs)


@games
def test_inputs_that_autocast_alone_makes_fit(game: dict[str, Any]) -> None:
    """bfloat16 inputs and float32 weights: without autocast the model does not even run."""
    model = mlp(dtype=torch.float32)
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    for x, y in data(2):
        autocast_step(model, opt, x.bfloat16(), y)
    assert all(t.isfinite().all() for t in values(model))


@games
@pytest.mark.parametrize("how", ["autocast", "bfloat16 weights"])
def test_everything_that_adds_up_is_float32(game: dict[str, Any], how: str) -> None:
    dtype = torch.bfloat16 if how == "bfloat16 weights" else torch.float32
    model = mlp(dtype=dtype)
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    for x, y in batches(3, dtype=dtype):
        if how == "autocast":
            autocast_step(model, opt, x, y)
        else:
            train(model, opt, [(x, y)])
    assert all(p.dtype == dtype for p in model.parameters())
    found = opt.diagnostics
    assert found.kernels.K.dtype == found.w.dtype == torch.float32
    for state in state_of(opt):
        assert all(v.dtype == torch.float32 for v in state.values() if isinstance(v, Tensor))


@games
@pytest.mark.parametrize("how", ["autocast", "bfloat16 weights"])
def test_training_in_half_precision_follows_that_in_single(game: dict[str, Any], how: str) -> None:
    losses = {}
    for half in (False, True):
        dtype = torch.bfloat16 if half and how != "autocast" else torch.float32
        model = mlp(width=16, dtype=dtype)
        opt = OCNOpt(model.parameters(), 0.02, model=model, damping=0.1, **game)
        (x, y) = batches(size=12, dtype=dtype)[0]
        for _ in range(10):
            if half and how == "autocast":
                autocast_step(model, opt, x, y)
            else:
                train(model, opt, [(x, y)])
        with torch.no_grad():
            losses[half] = nn.functional.cross_entropy(model(x).float(), y).item()
    assert losses[True] == pytest.approx(losses[False], rel=0.1, abs=0.03)


@pytest.mark.parametrize("rank", [1, 3, "full"])
@pytest.mark.parametrize("feedback", ["linear", "nonlinear"])
def test_layers_act_in_single_precision_inside_the_second_pass(feedback: str, rank: Any) -> None:
    """With next to no feedback the step is −η times the gradient, not rounded to bfloat16."""
    model = mlp(dtype=torch.float32)
    opt = OCNOpt(
        model.parameters(), 0.5, model=model, curvature="identity", momentum=0.0, gauss_newton=1e-3,
        feedback=feedback, rank=rank,
    )  # fmt: skip
    before = values(model)
    autocast_step(model, opt, *data()[0])
    expected = [b - 0.5 * p.grad for b, p in zip(before, model.parameters(), strict=True)]
    torch.testing.assert_close(values(model), expected, rtol=1e-5, atol=2e-6)


def test_diagnostics_read_under_autocast_are_not_rounded() -> None:
    traces = []
    for enabled in (False, True):
        model = mlp(dtype=torch.float32)
        opt = OCNOpt(model.parameters(), model=model, rank=3)
        train(model, opt, data())
        with autocast(enabled):
            traces.append([(layer.trace, layer.s) for layer in opt.diagnostics.layers])
    assert traces[0] == traces[1]

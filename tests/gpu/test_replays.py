"""``opt.step()`` from a CUDA graph of itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.replaying import GAMES, assert_same, both, data, make, train
from torch.nn.functional import cross_entropy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("kind", ["chain", "residual"])
@pytest.mark.parametrize("game", GAMES, ids=lambda g: "-".join(map(str, g.values())))
def test_the_numbers_are_those_of_ordinary_steps(kind: str, game: dict[str, Any]) -> None:
    # where a gradient is next to nothing, adaptive curvature with a small ε makes much of its rounding
    ours, theirs, reasons = both(kind, data(kind, 30, device="cuda"), device="cuda", eps=0.1, **game)
    assert reasons.count(None) >= 9, reasons
    assert_same(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "game", [{"feedback": "linear"}, {"feedback": "nonlinear"}, {"feedback": "nonlinear", "rank": 3}]
)
def test_no_step_waits_for_the_device(game: dict[str, Any]) -> None:
    model, opt = make("residual", "cuda", **game)
    train(model, opt, data("residual", 13, device="cuda"))
    seen = data("residual", 4, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        reasons = train(model, opt, seen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reasons == [None] * 4


@pytest.mark.parametrize("fused", [None, False])
def test_gradients_somewhere_else_at_each_step(fused: bool | None) -> None:
    """Kernels are told where they are, or they are copied."""
    trainings = [make("residual", "cuda", graphed=graphed, fused=fused, eps=0.1) for graphed in (None, False)]
    for model, opt in trainings:
        held = []
        for x, y in data("residual", 20, device="cuda"):
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            for p in model.parameters():
                p.grad = None if p.grad is None else p.grad.clone()
                held.append(p.grad)
            opt.step()
    assert trainings[0][1]._replays.reason is None
    assert_same(*trainings, rtol=1e-3, atol=1e-4)


def test_rates_that_change_and_gradients_that_are_clipped() -> None:
    trainings = [make("residual", "cuda", graphed=graphed, feedback="nonlinear", eps=0.1) for graphed in (None, False)]
    for model, opt in trainings:
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        for x, y in data("residual", 20, device="cuda"):
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            schedule.step()
    assert trainings[0][1]._replays.reason is None
    assert_same(*trainings, rtol=1e-3, atol=1e-4)


def test_a_scaler() -> None:
    trainings = [make("residual", "cuda", graphed=graphed, feedback="nonlinear", eps=0.1) for graphed in (None, False)]
    for model, opt in trainings:
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        for x, y in data("residual", 20, device="cuda"):
            opt.zero_grad()
            scaler.scale(cross_entropy(model(x), y)).backward()
            scaler.step(opt)
            scaler.update()
    assert trainings[0][1]._replays.reason is None
    assert_same(*trainings, rtol=1e-3, atol=1e-4)


def test_state_that_is_loaded_is_gone_on_with() -> None:
    """The graph before it is gone, and its memory with it."""
    trainings = [make("residual", "cuda", graphed=graphed, feedback="nonlinear", eps=0.1) for graphed in (None, False)]
    for model, opt in trainings:
        train(model, opt, data("residual", 13, device="cuda"))
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        train(model, opt, data("residual", 9, device="cuda"))
    assert trainings[0][1]._replays.captures == 2
    assert trainings[0][1]._replays.reason is None
    assert_same(*trainings, rtol=1e-3, atol=1e-4)

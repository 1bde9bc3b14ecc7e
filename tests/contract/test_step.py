"""The contract of every optimizer of torch: closures, gradients, hooks, what is refused."""

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
    differ,
    mlp,
    name_of,
    state_of,
    train,
    values,
)
from torch import Tensor, nn

from ocnopt import OCNOpt

games = pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)


@games
def test_a_closure_is_called_once_with_gradients_and_returned(game: dict[str, Any]) -> None:
    model, (x, y) = mlp(), batches()[0]
    opt = OCNOpt(model.parameters(), model=model, **game)
    losses: list[Tensor] = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        opt.zero_grad()
        losses.append(backward(model, x, y))
        return losses[-1]

    with torch.no_grad():
        returned = opt.step(closure)
    assert len(losses) == 1
    assert returned is losses[0]
    opt.zero_grad()
    assert opt.step() is None, "no closure, no loss"


@games
def test_with_and_without_closure_the_same_steps(game: dict[str, Any]) -> None:
    model, twin = mlp(), mlp()
    opt, opt2 = (OCNOpt(m.parameters(), model=m, **game) for m in (model, twin))
    train(model, opt, batches(3))
    for x, y in batches(3):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt2.zero_grad()
            return backward(twin, x, y)

        opt2.step(closure)
    assert_identical(values(model), values(twin))


@pytest.mark.parametrize(
    "options", [{}, {"maximize": True, "weight_decay": 0.1, "momentum": 0.9}], ids=["", "maximize"]
)
@pytest.mark.parametrize("game", [*GAMES, {"feedback": "off"}], ids=name_of)
def test_gradients_are_only_read(game: dict[str, Any], options: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, **game, **options)
    for x, y in batches(2):
        opt.zero_grad()
        backward(model, x, y)
        grads = [p.grad for p in model.parameters()]
        before = [g.clone() for g in grads]
        opt.step()
        assert_identical(grads, before)
        assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))


def test_without_any_gradient_nothing_happens() -> None:
    for game in SOME_GAMES:
        model = mlp()
        opt = OCNOpt(model.parameters(), model=model, **game)
        before = values(model)
        opt.step()
        assert_identical(values(model), before)
        assert state_of(opt) == [{}] * 6


@games
def test_a_gradient_of_none_means_skip(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, weight_decay=0.1, **game)
    train(model, opt, batches(2))
    before, state = [p.detach().clone() for p in model[1].parameters()], state_of(opt)[2:4]
    opt.zero_grad()
    backward(model, *batches()[0])
    for p in model[1].parameters():
        p.grad = None
    opt.step()
    assert_identical(list(model[1].parameters()), before)
    assert_identical(state_of(opt)[2:4], state)
    assert differ(model[0].parameters(), [p * 0 for p in model[0].parameters()])


@pytest.mark.parametrize("game", GAMES, ids=name_of)
def test_clipping_is_honoured(game: dict[str, Any]) -> None:
    """A gradient clipped to nothing moves nothing, whatever the recorded adjoints say."""
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.1, model=model, momentum=0.0, gauss_newton=1e-9, **game)
    backward(model, *batches()[0])
    nn.utils.clip_grad_norm_(model.parameters(), 1e-12)
    before = values(model)
    opt.step()
    if game["curvature"] == "identity":
        expected = [p - 0.1 * q.grad for p, q in zip(before, model.parameters(), strict=True)]
        torch.testing.assert_close(values(model), expected, rtol=0, atol=1e-14)
    elif game["curvature"] == "kronecker":
        torch.testing.assert_close(values(model), before, rtol=0, atol=1e-8)


def test_step_hooks_and_schedulers() -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), lr=0.1)
    seen: list[str] = []
    opt.register_step_pre_hook(lambda *_: seen.append("before"))
    opt.register_step_post_hook(lambda *_: seen.append("after"))
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    train(model, opt, batches(1))
    assert seen == ["before", "after"]
    schedule.step(1.0)
    schedule.step(1.0)
    assert opt.param_groups[0]["lr"] == 0.05


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    opt = OCNOpt(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        opt.step()
    assert_identical(embedding.weight.detach(), before)


def test_complex_gradients_are_refused() -> None:
    p = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    opt = OCNOpt([p])
    (p * p.conj()).real.sum().backward()
    with pytest.raises(RuntimeError, match="does not support complex gradients"):
        opt.step()


@games
def test_zero_dimensional_and_empty_parameters(game: dict[str, Any]) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()
            self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
            self.nothing = nn.Parameter(torch.empty(0, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) * self.scale + self.nothing.sum()

    model = Odd()
    opt = OCNOpt(model.parameters(), model=model, **game)
    if game["rank"] == 1 and game["curvature"] != "kronecker":
        train(model, opt, batches(3))
    else:
        with pytest.warns(UserWarning, match="(scale|nothing): no adapter is registered for Odd"):
            train(model, opt, batches(3))
    assert model.scale.item() != 1.5
    assert all(t.isfinite().all() for t in values(model))


@pytest.mark.parametrize("game", [*GAMES, {"feedback": "off"}], ids=name_of)
def test_to_maximise_is_to_minimise_the_negative(game: dict[str, Any]) -> None:
    runs = []
    for sign in (1, -1):
        model = mlp()
        opt = OCNOpt(model.parameters(), 0.1, model=model, weight_decay=0.1, maximize=sign < 0, **game)
        for x, y in batches(3):
            opt.zero_grad()
            (sign * nn.functional.cross_entropy(model(x), y)).backward()
            opt.step()
        runs.append((values(model), state_of(opt)))
    torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-12)

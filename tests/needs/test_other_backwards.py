"""Other backward passes through the graph of a step, for saliency, an attack or a penalty, leave the step as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.toys import assert_identical, batches, differ, mlp, name_of, state_of, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt

GAMES: list[dict[str, Any]] = [
    {"curvature": "identity", "feedback": "nonlinear", "rank": 1},
    {"curvature": "identity", "feedback": "linear", "rank": 3},
    {"curvature": "kronecker", "feedback": "linear", "rank": 1},
    {"curvature": "kronecker", "feedback": "nonlinear", "rank": 3},
]
games = pytest.mark.parametrize("game", GAMES, ids=name_of)

#: (model, x, output, loss) → what is added to the loss
Other = Callable[[nn.Module, Tensor, Tensor, Tensor], Any]


class Skip(nn.Module):
    """Not a chain; its first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(5, 5), mlp(width=5)
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.rest(x + torch.tanh(self.rest[0](x)))


def saliency(model: nn.Module, x: Tensor, output: Tensor, loss: Tensor) -> float:
    torch.autograd.grad(output[:, 0].sum(), x, retain_graph=True)
    return 0.0


def attack(model: nn.Module, x: Tensor, output: Tensor, loss: Tensor) -> float:
    """The fast gradient sign method, and a look at what it did."""
    (g,) = torch.autograd.grad(30 * loss, x, retain_graph=True)
    with torch.no_grad():
        model(x + 0.1 * g.sign())
    return 0.0


def penalty(model: nn.Module, x: Tensor, output: Tensor, loss: Tensor, weight: float = 0.0) -> Tensor:
    """Differentiated twice, even if it does not weigh anything."""
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    return weight * g.square().sum()


def look(model: nn.Module, x: Tensor, output: Tensor, loss: Tensor) -> float:
    """The norm of the gradient, say, of a multiple of the loss."""
    torch.autograd.grad(30 * loss, trained(model), retain_graph=True)
    return 0.0


def look_elsewhere(model: nn.Module, x: Tensor, output: Tensor, loss: Tensor) -> float:
    """At another batch, as influence functions do."""
    torch.autograd.grad(model(x[:4] + 1.0).square().sum(), trained(model))
    return 0.0


def penalty_on_parameters(model: nn.Module, x: Tensor, output: Tensor, loss: Tensor, weight: float = 0.0) -> Tensor:
    found = torch.autograd.grad(loss, trained(model), create_graph=True)
    return weight * sum(g.square().sum() for g in found)


def trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def own_pass(model: nn.Module, x: Tensor, output: Tensor, loss: Tensor) -> float:
    """Between forward and backward of the step, with a graph of its own."""
    torch.autograd.grad(model(x + 1.0).square().sum(), x)
    return 0.0


def step_with(build: Callable[[], nn.Module], other: Other | None, game: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = build().double()
    opt = OCNOpt(model.parameters(), 0.5, model=model, momentum=0.0, clamp=False, **game)
    for x, y in batches(2):
        opt.zero_grad(set_to_none=False)
        x.requires_grad_()
        output = model(x)
        loss = cross_entropy(output, y)
        more = 0.0 if other is None else other(model, x, output, loss)
        (loss + more).backward()
        opt.step()
    return values(model), state_of(opt)


@games
@pytest.mark.parametrize("build", [mlp, Skip])
@pytest.mark.parametrize("other", [saliency, attack, penalty, own_pass, look, look_elsewhere, penalty_on_parameters])
def test_gradients_that_are_asked_for_are_not_those_of_the_loss(
    other: Other, build: Callable[[], nn.Module], game: dict[str, Any]
) -> None:
    ours, theirs = step_with(build, other, game), step_with(build, None, game)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@games
@pytest.mark.parametrize("penalty", [penalty, penalty_on_parameters])
def test_a_penalty_that_counts_is_in_the_step(game: dict[str, Any], penalty: Any) -> None:
    found, _ = step_with(mlp, partial(penalty, weight=1e3), game)
    assert all(t.isfinite().all() for t in found)
    assert differ(found, step_with(mlp, None, game)[0])


@games
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_look_at_any_moment(game: dict[str, Any], accumulate: int, when: str) -> None:
    """Of steps that are made of two passes, with a graph of its own."""
    runs = []
    for looks in (True, False):
        model = mlp()
        opt = OCNOpt(model.parameters(), 0.5, model=model, accumulate=accumulate, **game)
        for x, y in batches(2, size=8):
            opt.zero_grad(set_to_none=False)
            for i in range(2):
                if looks and when == ("before", "between")[i]:
                    torch.autograd.grad(model(x).square().sum(), trained(model))
                cross_entropy(model(x[4 * i : 4 * i + 4]), y[4 * i : 4 * i + 4]).backward()
            if looks and when == "after":
                torch.autograd.grad(model(x).square().sum(), trained(model))
            opt.step()
        runs.append((values(model), state_of(opt)))
    assert_identical(*runs)


@games
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_are_put_into_place_by_hand_train(game: dict[str, Any], passes: int) -> None:
    runs = []
    for by_hand in (True, False):
        model = mlp()
        opt = OCNOpt(model.parameters(), 0.5, model=model, **game)
        for x, y in batches(2):
            opt.zero_grad()
            for rows in torch.arange(6).chunk(passes):
                loss = cross_entropy(model(x[rows]), y[rows])
                if not by_hand:
                    loss.backward()
                    continue
                for p, g in zip(model.parameters(), torch.autograd.grad(loss, trained(model)), strict=True):
                    p.grad = g if p.grad is None else p.grad + g
            opt.step()
        runs.append((values(model), state_of(opt)))
    torch.testing.assert_close(*runs, rtol=1e-10, atol=1e-12)


@games
def test_by_hand_and_by_backward_in_one_step(game: dict[str, Any]) -> None:
    """What somebody has put into p.grad before a backward pass adds to it was no look."""
    runs = []
    for by_hand in (True, False):
        model = mlp()
        opt = OCNOpt(model.parameters(), 0.5, model=model, **game)
        (x, y), (x_2, y_2) = batches(2)
        loss = cross_entropy(model(x), y)
        if by_hand:
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, trained(model)), strict=True):
                p.grad = g
        else:
            loss.backward()
        cross_entropy(model(x_2), y_2).backward()
        opt.step()
        runs.append((values(model), state_of(opt)))
    torch.testing.assert_close(*runs, rtol=1e-10, atol=1e-12)


@games
def test_after_zero_grad_only_the_second_backward_counts(game: dict[str, Any]) -> None:
    runs = []
    for first in (True, False):
        model, (x, y) = mlp(), batches()[0]
        opt = OCNOpt(model.parameters(), 0.5, model=model, **game)
        output = model(x)
        if first:
            cross_entropy(output, y).backward(retain_graph=True)
            opt.zero_grad()
        output.square().mean().backward()
        opt.step()
        runs.append((values(model), state_of(opt)))
    assert_identical(*runs)


@games
def test_without_zero_grad_both_count(game: dict[str, Any]) -> None:
    runs = []
    for together in (True, False):
        model, (x, y) = mlp(), batches()[0]
        opt = OCNOpt(model.parameters(), 0.5, model=model, **game)
        output = model(x)
        losses = [cross_entropy(output, y), output.square().mean()]
        if together:
            sum(losses).backward()
        else:
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        opt.step()
        runs.append(values(model))
    torch.testing.assert_close(*runs)

"""Whatever else the model computes between forward, backward and step, the step is the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from tests.toys import CLASSES, FEATURES, SOME_GAMES, assert_identical, batches, name_of, state_of, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, CLASSES)
    ).double()  # fmt: skip


OTHER, TARGETS = batches(size=9, seed=77)[0]


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(OTHER)
    model.train()


def evaluate_and_forget(model: nn.Module) -> None:
    """The mode is left as it is."""
    with torch.inference_mode():
        model.eval()(OTHER)


def throw_away(model: nn.Module) -> None:
    model.eval()
    model(OTHER)  # with gradients enabled, and nobody takes them
    model.train()


def throw_away_later(model: nn.Module) -> None:
    model.eval()
    KEPT.append(model(OTHER))  # its graph stays alive during the step
    model.train()


KEPT: list[Tensor] = []


def input_gradient(model: nn.Module) -> None:
    """A saliency map: gradients, but not of the parameters."""
    model.eval()
    x = OTHER.clone().requires_grad_()
    with torch.random.fork_rng():
        torch.autograd.grad(model(x).sum(), x)
    model.train()


def call_a_part(model: nn.Module) -> None:
    model[0](OTHER)


INTERLUDES: list[Callable[[nn.Module], None]] = [
    evaluate,
    evaluate_and_forget,
    throw_away,
    throw_away_later,
    input_gradient,
    call_a_part,
]


def run(game: dict[str, Any], where: str, interlude: Callable[[nn.Module], None]) -> tuple[list[Any], list[Any]]:
    model = net()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    torch.manual_seed(5)
    for x, y in batches(3):
        model.train()
        if where == "before forward":
            interlude(model)
        output = model(x)
        if where == "after forward":
            interlude(model)
        opt.zero_grad()
        if where == "after zero_grad":
            interlude(model)
        cross_entropy(output, y).backward()
        if where == "after backward":
            interlude(model)
        opt.step()
    KEPT.clear()
    return values(model), state_of(opt)


CASES = [
    *product(INTERLUDES, ("after forward", "after backward")),
    (throw_away, "before forward"),
    (throw_away, "after zero_grad"),
]


@pytest.mark.parametrize(("interlude", "where"), CASES, ids=[f"{f.__name__} {w}" for f, w in CASES])
@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_an_interlude_changes_nothing(game: dict[str, Any], interlude: Any, where: str) -> None:
    assert_identical(run(game, where, interlude), run(game, "nowhere", interlude))


def test_the_order_of_stages_is_that_of_the_training_pass() -> None:
    """A model that takes another way in evaluation does not take it in the step."""

    class TwoWays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(FEATURES, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            first, second = (self.a, self.b) if self.training else (self.b, self.a)
            return self.head(torch.tanh(second(torch.tanh(first(x)))))

    torch.manual_seed(0)
    model = TwoWays().double()
    opt = OCNOpt(model.parameters(), model=model, bellman="paper")
    x, y = batches()[0]
    loss = cross_entropy(model(x), y)
    evaluate(model)
    loss.backward()
    opt.step()
    assert [layer.name for layer in opt.diagnostics.layers] == ["a", "b", "head"]

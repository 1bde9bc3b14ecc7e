"""Whatever else the model computes between forward, backward and step, the step is the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from tests.toys import CLASSES, FEATURES, SOME_GAMES, assert_identical, batches, name_of, state_of, values
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

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


class TwoWays(nn.Module):
    """Takes another way in evaluation; returns more than the loss is made of."""

    def __init__(self, forgets: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = (nn.Linear(FEATURES, n) for n in (FEATURES, FEATURES, CLASSES))
        self.forgets = forgets
        self.double()

    def forward(self, x: Tensor) -> dict[str, Any]:
        first, second = (self.a, self.b) if self.training else (self.b, self.a)
        x = torch.tanh(second(torch.tanh(checkpoint(first, x, use_reentrant=False) if self.forgets else first(x))))
        return {"features": x, "logits": self.head(x), "size": len(x), "input": x.detach()}


#: what asks the passes for who acts when, and for nothing else
ORDERED: list[dict[str, Any]] = [
    {"bellman": "paper"},
    {"bellman": "paper", "feedback": "nonlinear"},
    {"bellman": "paper", "curvature": "kronecker"},
    {"bellman": "paper", "curvature": "kronecker", "factor_every": 3},
    {"game": "noncooperative"},
]


def train_two_ways(
    game: dict[str, Any],
    where: str = "nowhere",
    interlude: Callable[[nn.Module], None] = throw_away,
    *,
    forgets: bool = False,
    compiled: bool = False,
    passes: int = 1,
    **loop: Any,
) -> tuple[list[Any], list[Any]]:
    inner = TwoWays(forgets)
    opt = OCNOpt(inner.parameters(), 0.05, model=inner, **game)
    model = torch.compile(inner, backend="eager") if compiled else inner
    for pairs in zip(*[iter(batches(3 * passes))] * passes, strict=True):
        opt.zero_grad(**loop)
        for x, y in pairs:
            logits = model(x)["logits"]
            if where == "after forward":
                interlude(model)
            cross_entropy(logits, y).backward()
            if where == "after backward":
                interlude(model)
        opt.step()
    KEPT.clear()
    assert [layer.name for layer in opt.diagnostics.layers] == ["a", "b", "head"]
    return values(inner), state_of(opt)


def saliency(model: nn.Module) -> None:
    model.eval()
    x = OTHER.clone().requires_grad_()
    torch.autograd.grad(model(x)["logits"].sum(), x)
    model.train()


def keep(model: nn.Module) -> None:
    model.eval()
    KEPT.append(model(OTHER)["logits"])
    model.train()


@pytest.mark.parametrize("where", ["after forward", "after backward"])
@pytest.mark.parametrize("interlude", [evaluate, throw_away, keep, saliency])
@pytest.mark.parametrize("game", ORDERED, ids=name_of)
def test_the_stages_are_those_of_the_pass_that_is_trained_on(game: dict[str, Any], interlude: Any, where: str) -> None:
    assert_identical(train_two_ways(game, where, interlude), train_two_ways(game))


@pytest.mark.parametrize("game", [ORDERED[0], ORDERED[-1]], ids=name_of)
@pytest.mark.parametrize(
    "how",
    [{"forgets": True}, {"compiled": True}, {"passes": 2}, {"passes": 2, "set_to_none": False}],
    ids=name_of,
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler
def test_whatever_else_is_done_to_that_pass(game: dict[str, Any], how: dict[str, Any]) -> None:
    torch._dynamo.reset()
    for where in ("after forward", "after backward"):
        assert_identical(train_two_ways(game, where, **how), train_two_ways(game, **how))


@pytest.mark.parametrize("game", [ORDERED[0], ORDERED[-1]], ids=name_of)
def test_of_a_pass_whose_backward_was_thrown_away_nothing_is_left(game: dict[str, Any]) -> None:
    """Evaluation, with gradients that nobody wants; the training pass has begun before they are given up."""

    def forgotten(model: nn.Module) -> None:
        model.eval()
        cross_entropy(model(OTHER)["logits"], TARGETS).backward()
        model.train().zero_grad()

    assert_identical(train_two_ways(game, "after forward", forgotten), train_two_ways(game))


def test_nothing_is_kept_of_a_pass_but_the_names_of_its_layers() -> None:
    model = TwoWays()
    opt = OCNOpt(model.parameters(), 0.05, model=model, bellman="paper")
    x, y = batches()[0]
    memory = StorageWeakRef(x.untyped_storage())
    output = model(x)["logits"]
    cross_entropy(output, y).backward()
    del x  # the output, and with it the hooks on the graph, is still there
    assert memory.expired()
    assert opt.memory_usage() == {}

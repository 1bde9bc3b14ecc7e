"""Meta-learning: passes with weights that are not the model's own, as ``functional_call`` lends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.toys import SOME_GAMES, assert_identical, batches, differ, mlp, name_of, state_of, train, values
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt

HOOKED = SOME_GAMES[1:]
FREE: list[dict[str, Any]] = [SOME_GAMES[0], {"bellman": "paper"}, {"game": "noncooperative"}]


def adapted(model: nn.Module, x: Tensor, y: Tensor, *, direct: bool = False) -> dict[str, Tensor]:
    """The weights after a step on one task, as a function of those before it."""
    own = dict(model.named_parameters())
    output = model(x) if direct else functional_call(model, own, (x,))
    found = torch.autograd.grad(cross_entropy(output, y), list(own.values()), create_graph=True)
    return {name: p - 0.1 * g for (name, p), g in zip(own.items(), found, strict=True)}


def maml(model: nn.Module, direct: bool = False) -> Tensor:
    (x, y), (x_2, y_2) = batches(2)
    return cross_entropy(functional_call(model, adapted(model, x, y, direct=direct), (x_2,)), y_2)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("game", FREE, ids=name_of)
def test_what_reads_gradients_alone_learns_to_learn(game: dict[str, Any], direct: bool) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    losses = []
    for _ in range(5):
        opt.zero_grad()
        loss = maml(model, direct)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert [layer.name for layer in opt.diagnostics.layers] == [n for n, m in model.named_modules() if is_linear(m)]


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


@pytest.mark.parametrize("also", ["alone", "with a pass of its own"])
@pytest.mark.parametrize("game", HOOKED, ids=name_of)
def test_what_reads_layers_refuses_and_nothing_is_touched(game: dict[str, Any], also: str) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    train(model, opt, batches(2))
    opt.zero_grad()
    loss = maml(model)
    if also != "alone":
        x, y = batches()[0]
        loss = loss + cross_entropy(model(x), y)
    loss.backward()
    before = values(model), state_of(opt)
    with pytest.raises(RuntimeError, match="own weights, but gradients came through functional_call"):
        opt.step()
    assert_identical((values(model), state_of(opt)), before)
    train(model, opt, batches(2))  # the next step is one like any other
    assert differ(values(model), before[0])


def inner_loop(model: nn.Module) -> None:
    """Adapts to a task, and looks at how well that went."""
    (x, y), (x_2, y_2) = batches(2, seed=9)
    fast = adapted(model, x, y)
    loss = cross_entropy(functional_call(model, fast, (x_2,)), y_2)
    torch.autograd.grad(loss, list(fast.values()), retain_graph=True)
    torch.autograd.grad(loss, list(model.parameters()))


def on_copies(model: nn.Module) -> None:
    """Weights that remember nothing of those they were copied from."""
    copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    x, y = batches(seed=9)[0]
    cross_entropy(functional_call(model, copies, (x,)), y).backward()


@pytest.mark.parametrize("where", ["before forward", "after forward", "after backward"])
@pytest.mark.parametrize("interlude", [inner_loop, on_copies])
@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_beside_a_step_it_leaves_no_trace(
    game: dict[str, Any], interlude: Callable[[nn.Module], None], where: str
) -> None:
    runs = []
    for present in (True, False):
        model = mlp()
        opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
        for x, y in batches(2):
            opt.zero_grad()
            if present and where == "before forward":
                interlude(model)
            output = model(x)
            if present and where == "after forward":
                interlude(model)
            cross_entropy(output, y).backward()
            if present and where == "after backward":
                interlude(model)
            opt.step()
        runs.append((values(model), state_of(opt)))
    assert_identical(*runs)


@pytest.mark.parametrize("order", ["after", "before"])
@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_a_pass_with_the_parameters_of_another_network_leaves_the_step_alone(game: dict[str, Any], order: str) -> None:
    """A teacher, or an average of the weights, that has the same code: its parameters get gradients of their own."""
    runs = []
    for lends in (False, True):
        model, other = mlp(), mlp()
        opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
        for x, y in batches(3):
            opt.zero_grad()
            if lends and order == "before":
                cross_entropy(functional_call(model, dict(other.named_parameters()), (2 * x,)), y).backward()
            cross_entropy(model(x), y).backward()
            if lends and order == "after":
                cross_entropy(functional_call(model, dict(other.named_parameters()), (2 * x,)), y).backward()
            opt.step()
        runs.append((values(model), state_of(opt)))
    assert_identical(*runs)

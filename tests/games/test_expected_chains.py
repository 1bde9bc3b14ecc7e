"""Chains of which it is foreseen what they do: only the inputs at which the policy is asked are watched."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.games.test_odd import CLASSES, IN, data, make
from tests.games.test_watched import unforeseen
from tests.toys import values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt
from ocnopt.capture import Tape


class Chain(nn.Module):
    """Norms act with the layer before them, and are not asked."""

    rate, skips, grows = 1.0, False, False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(IN, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.a(x)))
        if self.grows:
            h = h + 0.1 * h.square()
        inner = h if self.skips else torch.tanh(self.b(h) * self.rate)
        return self.c(inner + h if self.skips is None else inner)


def train(model: nn.Module, opt: OCNOpt, steps: int, seed: int = 0, needs_grad: bool = False) -> list[Any]:
    found: list[Any] = []
    for i in range(steps):
        x, y = data(seed + i)
        opt.zero_grad()
        cross_entropy(model(x.requires_grad_(needs_grad)), y).backward()
        opt.step()
        found += [*values(model), opt.diagnostics.s]
    return found


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize(
    "changes", [{}, {"rate": 0.4}, {"skips": True}, {"grows": True}, {"skips": None}], ids=lambda c: str(c)
)
def test_what_a_chain_does_may_change(changes: dict[str, Any], rank: int) -> None:
    """A number, a layer that is left out, an operation between two layers, a skip connection: at the first step of it,
    and when it is over, all is as if nothing had been expected.
    """
    found = []
    for may in (True, False):
        model, opt = make(Chain, lr=0.3, rank=rank)
        if may:
            train(model, opt, 3)
        else:
            with unforeseen():
                train(model, opt, 3)
        assert opt._tape.follower._flows[0].asking is not None
        assert opt.game.why_accumulated is None
        for name, value in changes.items():
            setattr(model, name, value)
        steps = []
        for names in ((), changes):
            for name in names:
                setattr(model, name, getattr(Chain, name))
            if may:
                steps += train(model, opt, 3, 5)
            else:
                with unforeseen():
                    steps += train(model, opt, 3, 5)
        found.append(steps)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(IN, 6), nn.Linear(IN, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(x)) + self.a(x))


@pytest.mark.parametrize("rank", [1, 3])
def test_an_input_whose_gradient_is_wanted_now(rank: int) -> None:
    """With one path frozen it is a chain, unless gradients go back to the input along both."""
    found = []
    for may in (True, False):
        model, opt = make(Fork, lr=0.3, rank=rank)
        model.a.requires_grad_(False)
        if may:
            found.append([*train(model, opt, 3), *train(model, opt, 3, 5, needs_grad=True)])
        else:
            with unforeseen():
                found.append([*train(model, opt, 3), *train(model, opt, 3, 5, needs_grad=True)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("options", [{"rank": 3}, {"curvature": "kronecker"}], ids=str)
def test_a_layer_that_did_not_act_in_the_last_step(options: dict[str, Any]) -> None:
    """Nobody was to ask at its input, so what has changed there is predicted."""
    model, opt = make(Chain, lr=0.3, **options)
    for i in range(6):
        x, y = data(i)
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        if i < 4:
            for p in model.b.parameters():
                p.grad = None
        opt.step()
        if i == 4:
            before = opt.diagnostics.s[list(opt.diagnostics.names).index("b")]
            after = opt.diagnostics.s[list(opt.diagnostics.names).index("c")]
    assert (before != 0).all()
    assert (before != after).all()


@pytest.mark.parametrize("rank", [1, 3])
def test_such_a_layer_of_a_chain_that_does_something_else(rank: int) -> None:
    """From there on nothing is foreseen, and all inputs are read: what has changed is measured."""
    found = []
    for may in (True, False):
        model, opt = make(Chain, lr=0.3, rank=rank)
        with nullcontext() if may else unforeseen():
            for i in range(6):
                x, y = data(i)
                opt.zero_grad()
                model.grows = i == 4
                cross_entropy(model(x), y).backward()
                if i < 4:
                    for p in model.b.parameters():
                        p.grad = None
                opt.step()
                if i == 4:
                    found.append([*values(model), opt.diagnostics.s])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_a_chain_that_is_given_a_hook_is_still_one() -> None:
    """A hook that changes what a layer returns cannot be run again operation by operation, and need not be."""
    found = []
    for may in (True, False):
        model, opt = make(Chain, lr=0.3, alignment="last")
        with nullcontext() if may else unforeseen():
            train(model, opt, 4)
            model.b.register_forward_hook(lambda module, args, out: 1.1 * out)
            found.append(train(model, opt, 3, 5))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rank", [1, 3])
def test_nothing_else_is_watched(rank: int) -> None:
    """Two layers are asked at their inputs, and the loss at the output. Its graph is not looked at."""
    model, opt = make(Chain, lr=0.3, rank=rank)
    train(model, opt, 3)
    watched, looked = patch.object(Tape, "alias", autospec=True, side_effect=Tape.alias), "ocnopt.capture.is_chain"
    with watched as alias, patch(looked, side_effect=AssertionError):
        train(model, opt, 1)
    readers = [call.args[3].name if call.args[3] is not None else "the loss" for call in alias.call_args_list]
    assert readers == ["b", "c", "the loss"]

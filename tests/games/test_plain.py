"""Models whose own code leaves them no choice: who may change what they do, or what they read, is noticed."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.games.test_expected_chains import train
from tests.games.test_odd import Net, make
from tests.games.test_settled import Looks, replaced
from tests.games.test_watched import unforeseen
from torch import Tensor, nn
from torch.nn import functional as F

HERE = globals()
ON, RATE = False, 1.0


def squashed(h: Tensor, times: float = 1.0) -> Tensor:
    return times * torch.tanh(h)


def halved(h: Tensor, times: float = 0.5) -> Tensor:
    return times * torch.relu(h)


class Wired(Net):
    """With a layer that it may choose instead of another."""

    on, kind = False, "class"

    def __init__(self) -> None:
        super().__init__()
        self.c, self.k, self.act = nn.Linear(4, 4), 0, nn.ReLU()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.register_buffer("width", torch.tensor(4))


def code(block: Callable[..., Any]) -> type[Wired]:
    """A model with that code."""
    return type("Coded", (Wired,), {"block": block, "__module__": __name__})


# --- what leaves no choice ---


def residual(self: Any, z: Tensor) -> Tensor:
    identity = z
    out = self.b(self.act(self.a(z)))
    if self.k is None:
        identity = self.c(z)
    out += identity
    return F.relu(out)


def dense(self: Any, z: Tensor) -> Tensor:
    found = [z]
    for i, layer in enumerate(self.layers):
        found.append(squashed(layer(sum(found)), times=RATE + i))
    return torch.cat([found[0], found[-1]], 1).reshape(z.shape[0], 2, -1).mean(1)


def chosen(self: Any, z: Tensor) -> Tensor:
    return z + (self.c if self.on or ON else self.layers[self.k])(torch.tanh(self.a(z)))


def helped(self: Any, z: Tensor) -> Tensor:
    return z + self.b(squashed(self.a(z)))


def sized(self: Any, z: Tensor) -> Tensor:
    return z + self.b(torch.tanh(self.a(z))) * len(self.layers) * math.sqrt(2)


def crossed(self: Any, z: Tensor) -> Tensor:
    return self.b(torch.tanh(self.a(z))) + 2 * self.a(z)


def typed(self: Any, z: Tensor) -> Tensor:
    return z + (self.b if isinstance(self.k, int) else self.c)(self.a(z).tanh())


def repeated(self: Any, z: Tensor) -> Tensor:
    """It is the second sum that reads what was there before."""
    h = self.b(torch.tanh(self.a(z)))
    return (h + 1.0) + torch.add(input=z, other=h) + 0.5 * torch.stack([z, h], 2).sum(2)


def doubled(self: Any, z: Tensor) -> Tensor:
    return torch.addcmul(self.b(torch.tanh(self.a(z))), z, z)


PLAIN = (doubled, residual, dense, chosen, helped, sized, crossed, typed, repeated)


@pytest.mark.parametrize("block", PLAIN, ids=lambda block: block.__name__)
@pytest.mark.parametrize("rank", [1, 3])
def test_nobody_looks(block: Callable[..., Any], rank: int) -> None:
    found = []
    for may in (True, False):
        model, opt = make(code(block), lr=0.1, rank=rank)
        if may:
            steps = train(model, opt, 4)
            with Looks() as looks:
                steps += train(model, opt, 4, 7)
            assert looks.call_count == 0
        else:
            with unforeseen():
                steps = [*train(model, opt, 4), *train(model, opt, 4, 7)]
        found.append(steps)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def _swap(model: Any) -> None:
    """The same modules in the same order, by other names."""
    a, b = model._modules["a"], model._modules["b"]
    names = {"a": "b", "b": "a"}
    there = [(names.get(name, name), module) for name, module in model._modules.items()]
    model._modules.clear()
    model._modules.update(there)
    assert (model.a, model.b) == (b, a)


class Also(Wired):
    def forward(self, x: Tensor) -> Any:
        return 2 * self.head(torch.tanh(self.into(x)))


_count = len


def _miscounted(things: Any) -> int:
    return 5 if isinstance(things, nn.ModuleList) else _count(things)


CHANGES: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "setting": (residual, lambda m: patch.object(m, "k", None)),
    "setting, equal": (typed, lambda m: patch.object(m, "k", 0.0)),
    "setting, no constant": (residual, lambda m: patch.object(m, "k", torch.ones(2))),
    "new setting": (chosen, lambda m: patch.object(m, "on", True)),
    "of the class": (chosen, lambda m: patch.object(type(m), "on", True)),
    "of a class above": (chosen, lambda m: patch.object(Wired, "on", True)),
    "index": (chosen, lambda m: patch.object(m, "k", 1)),
    "global": (chosen, lambda m: patch.dict(HERE, ON=True)),
    "global number": (dense, lambda m: patch.dict(HERE, RATE=0.3)),
    "function": (helped, lambda m: patch.dict(HERE, squashed=halved)),
    "its code": (helped, lambda m: replaced(squashed, "__code__", halved.__code__)),
    "its defaults": (helped, lambda m: replaced(squashed, "__defaults__", (3.0,))),
    "builtin": (sized, lambda m: patch.dict(HERE, len=lambda things: 5)),
    "of builtins": (sized, lambda m: patch("builtins.len", _miscounted)),
    "of torch": (helped, lambda m: patch.object(torch, "tanh", torch.relu)),
    "of math": (sized, lambda m: patch.object(math, "sqrt", math.exp)),
    "of tensors": (typed, lambda m: patch.object(Tensor, "tanh", lambda t: torch.relu(t))),
    "method": (chosen, lambda m: patch.object(type(m), "block", residual)),
    "method of one": (chosen, lambda m: patch.object(m, "block", types.MethodType(residual, m))),
    "forward": (chosen, lambda m: patch.object(type(m), "forward", Also.forward)),
    "call": (chosen, lambda m: patch.object(type(m), "__call__", lambda self, x: self._call_impl(2 * x))),
    "class": (chosen, lambda m: replaced(m, "__class__", Also)),
    "hook on gradients": (residual, lambda m: m.act.register_full_backward_hook(lambda m, into, out: (3 * into[0],))),
    "autocast": (residual, lambda m: torch.autocast("cpu", torch.bfloat16)),
    "mode of a child": (residual, lambda m: patch.object(m.act, "inplace", True)),
}


@pytest.mark.parametrize(("block", "change"), CHANGES.values(), ids=CHANGES)
def test_what_code_depends_on_may_change(block: Callable[..., Any], change: Callable[[Any], Any]) -> None:
    """From the next pass on all is as if nothing had been expected; and so it is when that is over."""
    found = []
    for may in (True, False):
        model, opt = make(code(block), lr=0.1)

        def steps(model: Any = model, opt: Any = opt) -> list[Any]:
            before = train(model, opt, 5)
            with change(model):
                with Looks() as looks:
                    before += train(model, opt, 1, 7)
                assert looks.call_count == 1
                before += train(model, opt, 2, 8)
            return before + train(model, opt, 2, 10)

        if may:
            found.append(steps())
        else:
            with unforeseen():
                found.append(steps())
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_other_names_for_the_same_modules() -> None:
    model, opt = make(code(crossed), lr=0.1)
    train(model, opt, 5)
    _swap(model)
    with Looks() as looks:
        train(model, opt, 1)
    assert looks.call_count == 1

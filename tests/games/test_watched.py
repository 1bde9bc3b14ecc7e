"""Passes of which it is foreseen what they do: only the readings of live edges are kept, and the steps are the same."""

from __future__ import annotations

import gc
import operator
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.games import markov
from tests.games.test_odd import NETS, Net, data, make
from tests.toys import assert_identical, values
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt
from ocnopt.games.following import Habit

STEPS = 5


@contextmanager
def unforeseen() -> Iterator[None]:
    """Every pass is looked at as if it were the first."""
    with patch.object(Habit, "expected", lambda self: None):
        yield


def loss_of(out: Any, y: Tensor) -> Tensor:
    return cross_entropy(out if isinstance(out, Tensor) else out["logits"] + out["also"][0], y)


def train(model: nn.Module, opt: OCNOpt, steps: int = STEPS, passes: int = 1) -> list[bool]:
    """Of which passes it was foreseen what they would do."""
    foreseen = []
    for seed in range(steps):
        opt.zero_grad()
        for k in range(passes):
            x, y = data(seed + 10 * k)
            loss_of(model(x), y).backward()
        assert opt._tape is not None
        foreseen += [this.watched is not None for this in opt._tape.passes]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of layers without an adapter
            opt.step()
    return foreseen


class Overwriting(Net):
    """The stream is written to in place: no alias of it can be read."""

    add = staticmethod(operator.iadd)

    def block(self, z: Tensor) -> Tensor:
        z = 1.0 * z
        z = self.add(z, self.b(torch.tanh(self.a(1.0 * z))))
        return z


class Kept(Net):
    """An operation that returns what it was given, and both go on."""

    def block(self, z: Tensor) -> Tensor:
        same = z.contiguous()
        return same + self.b(torch.tanh(self.a(z))) + nn.functional.dropout(z, 0.5, training=False)


class Converted(Net):
    """What comes back may be the very tensor that was given, and both go on."""

    def block(self, z: Tensor) -> Tensor:
        h = self.b(torch.tanh(self.a(z)))
        return z.to(h) + torch.sin(z) * h


class Spent(Net):
    """The stream is overwritten after it was read."""

    multiply = staticmethod(operator.imul)

    def block(self, z: Tensor) -> Tensor:
        z = 1.0 * z
        total = z + self.b(torch.tanh(self.a(1.0 * z)))
        z = self.multiply(z, 2)
        return total + torch.tanh(z.clone())


class Doubled(Net):
    """One operation reads the same tensor twice."""

    def block(self, z: Tensor) -> Tensor:
        h = self.b(torch.tanh(self.a(z)))
        return torch.addcmul(h, z, z) + z * z


class Wired(Net):
    """What the block does is decided outside."""

    way = 0

    def block(self, z: Tensor) -> Tensor:
        if self.way == 1:
            return z
        h = self.b(torch.tanh(self.a(z)))
        return z + h if self.way == 0 else torch.tanh(z * h)


GALLERY = {
    **NETS,
    "overwritten": Overwriting,
    "overwritten when it was read": Spent,
    "returned as it is": Kept,
    "converted to what it is": Converted,
    "read twice": Doubled,
    "residual": lambda: markov.Residual(False),
    "residual with projection": lambda: markov.Residual(True),
}
#: after how many passes it is foreseen what the next does; never where stages cannot be run one by one, or where what
#: an edge leads to is overwritten
KNOWN = dict.fromkeys(GALLERY, 2)
KNOWN |= dict.fromkeys(["pre-hook", "hook", "borrowed weights", "complex", "views"], STEPS)
KNOWN |= dict.fromkeys(["input in a list", "overwritten", "overwritten when it was read", "routed"], STEPS)
KNOWN |= {"spectral norm": 3, "weight norm": 3}  # the weight is another attribute at first
KNOWN |= {"gradients enabled inside": STEPS}  # a chain, of which that need not be known


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("name", GALLERY)
def test_the_steps_are_the_same(name: str, rank: int) -> None:
    found, whys = [], []
    for may in (True, False):
        model, opt = make(GALLERY[name], lr=0.3, rank=rank)
        if may:
            foreseen = train(model, opt)
        else:
            with unforeseen():
                train(model, opt)
        found.append([*values(model), opt.diagnostics.s])
        whys.append(opt.game.why_accumulated)
    assert_identical(*found)  # a run that is resumed begins with passes of which nothing is known
    assert whys[0] == whys[1]
    assert foreseen == [k >= KNOWN[name] for k in range(STEPS)]


class NotOverwriting(Overwriting):
    add = staticmethod(operator.add)


class NotSpent(Spent):
    multiply = staticmethod(operator.mul)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("nets", [(Overwriting, NotOverwriting), (Spent, NotSpent)])
def test_overwriting_what_is_watched_changes_nothing(nets: Any, rank: int) -> None:
    found = []
    for net in nets:
        model, opt = make(net, lr=0.3, rank=rank)
        train(model, opt)
        assert opt.game.why_accumulated is None
        found.append([*values(model), opt.diagnostics.s])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("way", [1, 2])
def test_a_pass_that_does_something_else_after_all(way: int, passes: int) -> None:
    found = []
    for foreseen in (True, False):
        model, opt = make(Wired, lr=0.3)
        for _ in range(2):
            train(model, opt, 2, passes)
        model.way = way
        if foreseen:
            assert train(model, opt, 1, passes)[0]
        else:
            with unforeseen():
                train(model, opt, 1, passes)
        assert opt.game.why_accumulated is None
        found.append([*values(model), opt.diagnostics.s])
        assert opt.diagnostics.s.abs().max() > 0
        model.way = 0
        assert train(model, opt, 3)[-1]  # and then as before
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -0.5 * g


class Reversed(Net):
    """The gradient does not follow from the operations."""

    odd = False

    def block(self, z: Tensor) -> Tensor:
        h = self.b(torch.tanh(self.a(z)))
        return z + (Reversal.apply(h) if self.odd else h)


def test_a_pass_that_does_something_else_is_not_trusted() -> None:
    model, opt = make(Reversed, lr=0.3)
    train(model, opt, 4)
    model.odd = True
    assert train(model, opt, 1) == [True]
    assert "give other numbers" in (opt.game.why_accumulated or "")


def test_every_size_of_batch_has_its_habits() -> None:
    model, opt = make(lambda: markov.Residual(True), lr=0.1)
    seen = []
    for i in range(12):
        x, y = data(i)
        rows = slice(0, 4 if i % 3 == 2 else 6)
        opt.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        assert opt._tape is not None
        seen.append(opt._tape.passes[0].watched is None)
        opt.step()
        assert opt.game.why_accumulated is None
    assert seen == [True, True, True, False, False, True, False, False, False, True, False, False]


def test_two_losses_on_one_graph() -> None:
    found = []
    for at_once in (True, False):
        model, opt = make(Net, lr=0.3)
        train(model, opt, 3)
        x, y = data(9)
        opt.zero_grad()
        out = model(x)
        losses = cross_entropy(out, y), out.square().mean()
        if at_once:
            sum(losses).backward()
        else:
            losses[0].backward(retain_graph=True)
            losses[1].backward()
        assert opt._tape.passes[0].watched is not None
        opt.step()
        found.append([*values(model), opt.diagnostics.s])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chain", [False, True])
def test_nothing_but_adjoints_is_left_of_a_backward_pass(chain: bool) -> None:
    def sequence() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    model, opt = make(sequence if chain else Net, lr=0.1)
    train(model, opt, 3)
    memory: list[StorageWeakRef] = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Tanh)):
            module.register_forward_hook(lambda m, a, out: memory.append(StorageWeakRef(out.untyped_storage())))
    gc.collect()
    gc.disable()
    try:
        x, y = data(9)
        loss = cross_entropy(model(x), y)  # held, as by a loop that is going to print it
        loss.backward()
        assert len(memory) == (5 if chain else 4)
        assert all(m.expired() for m in memory)
    finally:
        gc.enable()
    before = opt.memory_usage()["tape"]
    inside = 6 * 4 * 8 * (2 if chain else 4)  # adjoints at two layers, or at the stream's readers too
    assert before < inside + 6 * (5 + 3) * 8 + 200
    opt.step()
    assert "tape" not in opt.memory_usage()


def test_an_output_that_is_overwritten_after_it_was_foreseen() -> None:
    model, opt = make(Net, lr=0.0)
    train(model, opt, 3)
    x, y = data(9)
    out = model(x)
    out.mul_(2)
    cross_entropy(out, y).backward()
    opt.step()
    assert "an output of the model was overwritten in place" in (opt.game.why_accumulated or "")
    assert opt.diagnostics.s.abs().max() == 0


def test_a_layer_of_a_chain_is_asked_as_soon_as_it_is_thawed() -> None:
    """What changed at its input is measured in its first step, and not predicted."""
    found = []
    for forgetful in (False, True):
        model, opt = make(
            lambda: nn.Sequential(*(each for _ in range(3) for each in (nn.Linear(5, 5), nn.Tanh()))), lr=0.3
        )
        model[2].requires_grad_(False)
        train(model, opt, 3)
        model[2].requires_grad_(True)
        if forgetful:
            assert opt._tape is not None
            opt._tape.follower.look_again()
        train(model, opt, 1)
        found.append([*values(model), opt.diagnostics.s])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chain", [False, True])
def test_groups_that_are_asked_for_after_the_pass(chain: bool) -> None:
    model, opt = make((lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))) if chain else Net, lr=0.3)
    train(model, opt, 3)
    x, y = data(9)
    cross_entropy(model(x), y).backward()
    opt.param_groups[0]["rank"], before = 3, values(model)
    with pytest.raises(RuntimeError, match="rank=3 was asked for after the forward pass"):
        opt.step()
    assert_identical(values(model), before)
    train(model, opt, 1)
    assert opt.game.why_accumulated is None


def test_an_alignment_that_is_changed_after_the_pass() -> None:
    """Other edges are live then: the skip connection was to act with the layer that it is added to."""
    found = []
    for may in (True, False):
        model, opt = make(lambda: markov.Residual(True), lr=0.3, alignment="last")
        train(model, opt, 3)
        x, y = data(9)
        opt.zero_grad()
        with nullcontext() if may else unforeseen():
            cross_entropy(model(x), y).backward()
        assert (opt._tape.passes[0].watched is not None) == may
        opt.param_groups[0]["alignment"] = "first"
        opt.step()
        assert opt.game.late == {"skip": 0}
        found.append([*values(model), opt.diagnostics.s])
    assert_identical(*found)

"""Passes that do what was expected: nothing of them is written down again, and nothing is copied that need not be."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.games.test_odd import WIDTH, B, Net, make
from tests.games.test_watched import train, unforeseen
from tests.toys import assert_identical, values
from torch import Tensor, nn

from ocnopt import OCNOpt
from ocnopt.games.flow import Overwriting
from ocnopt.games.recorder import Recorder


class Chain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.Linear(4, 3))


class Rectified(Net):
    def block(self, z: Tensor) -> Tensor:
        return z + self.b(torch.relu_(self.a(z)))


class Reshaped(Net):
    """A shape is no structure of tensors."""

    def block(self, z: Tensor) -> Tensor:
        return z + self.b(torch.tanh(self.a(z)).reshape(z.shape))


@pytest.mark.parametrize("net", [Net, Rectified, Chain, Reshaped])
def test_what_was_expected_is_not_written_down(net: Any) -> None:
    model, opt = make(net, lr=0.3)
    train(model, opt, 3)
    with patch.object(Recorder, "_spec", side_effect=AssertionError):
        train(model, opt, 2)


class Masked(Net):
    """A constant that is another one in every pass, and a number that is changed at times."""

    rate = 0.5

    def block(self, z: Tensor) -> Tensor:
        mask = torch.from_numpy((z.detach().numpy() > 0) * 1.0)
        return z + self.b(torch.tanh(self.a(z))) * mask * self.rate


class Swapped(Net):
    """A constant, or what the layers have made, without its gradient, is added to the stream."""

    own = False

    def __init__(self) -> None:
        super().__init__()
        self.fixed = torch.full((B, WIDTH), 0.3, dtype=torch.float64)

    def block(self, z: Tensor) -> Tensor:
        here = z.detach()
        return z + self.b(torch.tanh(self.a(z))) * here + (here if self.own else self.fixed)


@pytest.mark.parametrize(("net", "changes"), [(Masked, {"rate": 0.8}), (Swapped, {"own": True})])
def test_what_is_given_to_an_operation_may_change(net: Any, changes: dict[str, Any]) -> None:
    found = []
    for may in (True, False):
        model, opt = make(net, lr=0.3)
        train(model, opt, 3)
        for name, value in changes.items():
            setattr(model, name, value)
        if may:
            train(model, opt, 2)
        else:
            with unforeseen():
                train(model, opt, 2)
        assert opt.game.why_accumulated is None
        found.append([*values(model), opt.diagnostics.s])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


class Turned(Net):
    """The same tensor in another shape."""

    shape = torch.Size([B, WIDTH])

    def block(self, z: Tensor) -> Tensor:
        return z + self.b(torch.tanh(self.a(z)).reshape(self.shape).reshape(B, WIDTH))


def test_a_shape_may_change() -> None:
    model, opt = make(Turned, lr=0.3)
    train(model, opt, 3)
    model.shape = torch.Size([WIDTH, B])
    seen = []
    spec = Recorder._spec
    with patch.object(Recorder, "_spec", lambda *given: seen.append(given[3]) or spec(*given)):
        train(model, opt, 1)
    assert any(getattr(target, "__name__", "") == "reshape" for target in seen)  # it is written down again


class Failing(Net):
    """A layer that raises, and a forward pass that goes on without it."""

    fails = False

    def block(self, z: Tensor) -> Tensor:
        try:
            return z + self.b(torch.tanh(self.a(z[:, :-1] if self.fails else z)))
        except RuntimeError:
            return 2 * z


def test_a_layer_that_raises_in_a_pass_that_goes_on() -> None:
    model, opt = make(Failing, lr=0.3)
    train(model, opt, 3)
    model.fails = True
    train(model, opt, 1)
    assert "cannot be followed" in (opt.game.why_accumulated or "")
    assert torch.overrides._get_current_function_mode_stack() == []
    model.fails = False
    train(model, opt, 3)
    assert opt.game.why_accumulated is None


# --- the second pass ---


@pytest.mark.parametrize("foreseen", [True, False])
def test_what_nobody_else_reads_is_overwritten(foreseen: bool) -> None:
    """When stages are run one by one, and when a whole pass is run again."""
    model, opt = make(Rectified, lr=0.3)
    with nullcontext() if foreseen else unforeseen():
        train(model, opt, 3)
        with patch.object(Overwriting, "__call__", side_effect=AssertionError):
            train(model, opt, 1)
    assert opt.game.why_accumulated is None


class Shift(nn.Module):
    """Keeps nothing for the backward pass: what it read may be overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class Counting(Net):
    """In a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = torch.zeros(())

    def block(self, z: Tensor) -> Tensor:
        self.passes.add_(1)
        return z + self.b(torch.tanh(self.a(z)))


def test_nothing_is_counted_twice() -> None:
    model, opt = make(Counting, lr=0.3)
    with unforeseen():
        train(model, opt, 3)
    assert opt.game.why_accumulated is None
    assert model.passes == 3  # type: ignore[comparison-overlap]


class Beside(Net):
    """What is overwritten is read by a layer that acts later than the operation does."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.shift, self.in_place = Shift(), in_place

    def doubled(self, h: Tensor) -> Tensor:
        return h.mul_(2.0) if self.in_place else h * 2.0

    def block(self, z: Tensor) -> Tensor:
        h = self.a(z)
        return self.shift(h) + self.b(torch.tanh(self.doubled(h)))


class Viewed(Beside):
    """The same memory, by another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        h = 1.0 * x
        shifted, h = self.shift(h), h.detach()
        z = torch.tanh(self.into(self.doubled(h)))
        out: Tensor = self.head(z + self.b(z) * self.a(z) + shifted.sum(1, keepdim=True))
        return out


@pytest.mark.parametrize("net", [Beside, Viewed])
def test_what_somebody_else_reads_is_not_overwritten(net: Any) -> None:
    found = []
    for in_place in (True, False):
        model, opt = make(lambda in_place=in_place: net(in_place), lr=0.3)
        train(model, opt, 4)
        assert opt.game.why_accumulated is None
        found.append([*values(model), opt.diagnostics.s])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_in_place_activations_change_no_digit() -> None:
    found = []
    for may in (True, False):
        model, opt = make(Rectified, lr=0.3)
        if may:
            train(model, opt, 5)
        else:
            with unforeseen():
                train(model, opt, 5)
        found.append([*values(model), opt.diagnostics.s])
    assert_identical(*found)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.critic, self.actor = nn.Linear(6, 1).double(), nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.critic(x), self.actor(x)


@pytest.mark.parametrize("passes", [1, 2])
def test_an_output_that_the_loss_leaves_out(passes: int) -> None:
    """The first layer of a foreseen pass hears nothing."""
    ours = _trained(passes)
    with unforeseen():
        theirs = _trained(passes)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def _trained(passes: int) -> list[Any]:
    model, found = ActorCritic(), []
    opt = OCNOpt(model.parameters(), 0.05, model=model, feedback="nonlinear", momentum=0.0, curvature="identity")
    draw = torch.Generator().manual_seed(1)
    for i in range(8):
        opt.zero_grad()
        for k in range(passes):
            value, scores = model(torch.randn(7, 6, generator=draw, dtype=torch.float64))
            both = i < 5 and k == 0
            (scores.logsumexp(1).mean() + (value.square().mean() if both else 0)).backward()
        opt.step()
        found.append((values(model), opt.diagnostics.predicted_change))
    return found

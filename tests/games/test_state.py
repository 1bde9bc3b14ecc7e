"""The Markov state over live edges and its accumulated stand-in: where they agree, and who gets which."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exact.nets import seeded
from tests.games import markov
from tests.toys import assert_identical, on_every_call, predicted, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from ocnopt import OCNOpt

B = 6


def data(*shape: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(B, *shape, generator=g, dtype=torch.float64)
    return x, torch.randint(markov.CLASSES, (B,), generator=g)


def step(model: nn.Module, opt: OCNOpt, batch: tuple[Tensor, Tensor]) -> None:
    opt.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    opt.step()


def make(build: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, OCNOpt]:
    with seeded(0):
        model = build().double()
    fixed = {"curvature": "identity", "momentum": 0.0, "feedback": "nonlinear", "clamp": False}
    return model, OCNOpt(model.parameters(), model=model, **(fixed | options))


@pytest.mark.parametrize("rank", [1, 3, "full"])
@pytest.mark.parametrize("projection", [False, True])
def test_equal_in_a_linear_network(projection: bool, rank: int | str) -> None:
    steps = []
    for state in ("live", "accumulated"):
        model, opt = make(lambda: markov.Residual(projection, linear=True), lr=0.5, state=state, rank=rank)
        if projection:  # accumulated, layers act in the order of the code: one player in the block
            model.a.requires_grad_(False)
            model.b.requires_grad_(False)
        step(model, opt, data(5))
        assert (opt.game.why_accumulated is None) == (state == "live")
        steps.append(values(model))
    for live, accumulated in zip(*steps, strict=True):
        torch.testing.assert_close(live, accumulated, rtol=1e-10, atol=1e-12)


def test_they_differ_at_second_order() -> None:
    gaps = []
    for lr in (0.02, 0.01):
        s = []
        for state in ("live", "accumulated"):
            model, opt = make(lambda: markov.Residual(False), lr=lr, state=state)
            step(model, opt, data(5))
            s.append(opt.diagnostics.s)
        gaps.append(float((s[0] - s[1]).abs().max()))
    assert gaps[0] > 1e-12
    assert 3.3 < gaps[0] / gaps[1] < 4.7


def test_skip_called_last_acts_first() -> None:
    """The rollout follows the stages and not the lines of the code."""
    model, opt = make(lambda: markov.Residual(True), lr=0.5)
    step(model, opt, data(5))
    names = [layer.name for layer in opt.diagnostics.layers]
    assert names.index("skip") < names.index("b")
    stage = {layer.name: layer.stage for layer in opt.diagnostics.layers}
    assert stage["skip"] == stage["a"] < stage["b"]


# --- what happens between the layers ---


class Odd(nn.Module):
    """Everything that a recorder could stumble over."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.inner, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.randn(4))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.mask = torch.tensor([1.0, 0.5, 1.0, 2.0], dtype=torch.float64)  # no buffer
        self.alpha = 0.5

    def forward(self, x: Tensor) -> Tensor:
        z = self.into(x) + self.shift
        self.count += 1
        with torch.no_grad():
            self.mean.lerp_(z.mean(0), 0.1)
            scale = z.detach().abs().mean().item()  # a number that depends on values
        a, b = torch.tanh(z - self.mean).chunk(2, 1)
        z = torch.cat([a, b * 2], dim=1) * self.mask
        for _ in range(2):  # a module used twice
            out = torch.relu(self.inner(z)) * 1.0
            out += 0.1
            out[:, 0] = out[:, 0] + 1
            z = z + self.alpha * out / (1 + scale)
        return self.head(z)


def test_operations_that_are_hard_to_follow() -> None:
    model, opt = make(Odd, lr=0.3)
    step(model, opt, data(5))
    assert opt.game.why_accumulated is None
    assert [set(stage.players) for stage in opt.game.stages] == [*[{"into"}, {"shift"}, {"inner"}, {"inner"}, {"head"}]]
    assert model.count == 1  # of the second pass nothing is left


def test_numbers_in_the_code_may_change_from_step_to_step() -> None:
    """As if it were the first step each time."""
    model, opt = make(Odd, lr=0.3)
    for alpha in (0.5, 0.1, 0.5, 0.9):
        twin, its = make(Odd, lr=0.3)
        twin.load_state_dict(model.state_dict())
        its.load_state_dict(opt.state_dict())
        model.alpha = twin.alpha = alpha
        for each in ((model, opt), (twin, its)):
            step(*each, data(5))
        assert_identical(opt.diagnostics.s, its.diagnostics.s)
        assert_identical(values(model), values(twin))


class Straight(torch.autograd.Function):
    """Its gradient is not that of its operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign() * x.abs().sqrt()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


class Estimated(markov.Residual):
    def forward(self, x: Tensor) -> Tensor:
        z = Straight.apply(self.into(x))
        return self.head(z + self.b(torch.tanh(self.a(z))))


class Dropped(markov.Residual):
    def __init__(self, projection: bool) -> None:
        super().__init__(projection)
        self.c = nn.Linear(markov.WIDTH, markov.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = dropout(torch.tanh(self.into(x)), 0.3, self.training)
        path = dropout(self.b(torch.tanh(dropout(self.a(z), 0.2))), 0.5, self.training)
        return self.head(z + path + dropout(self.c(z), 0.5))  # c runs with a, but draws after b


class Outside(markov.Residual):
    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.into(x))
        return self.head(z + torch.from_numpy(self.a(z).detach().numpy()) + self.b(z))


def test_what_cannot_be_run_again_is_accumulated_and_said() -> None:
    model, opt = make(lambda: Estimated(False), lr=0.1)
    for _ in range(2):
        step(model, opt, data(5))
        assert re.search("state: accumulated layer by layer, since .* other numbers at 'into'", opt.summary())
    model, opt = make(lambda: Estimated(False), lr=0.1, alignment="last")
    with pytest.raises(RuntimeError, match=r"^alignment='last' needs a network that can run stage by stage"):
        step(model, opt, data(5))


def test_random_numbers_are_drawn_again() -> None:
    """With the masks of the first pass, in whatever order the stages run."""
    model, opt = make(lambda: Dropped(False), lr=0.0)
    torch.manual_seed(0)
    for _ in range(2):
        step(model, opt, data(5))
        assert opt.game.why_accumulated is None
        assert opt.diagnostics.s.abs().max() == 0  # nothing moved: another mask would show
    opt.param_groups[0]["lr"] = 1e-4
    step(model, opt, data(5))
    torch.testing.assert_close(opt.diagnostics.s, predicted(opt.diagnostics), rtol=1e-2, atol=1e-9)


def test_a_part_without_gradient_is_followed() -> None:
    model, opt = make(lambda: Outside(False), lr=0.1)
    step(model, opt, data(5))
    assert opt.game.why_accumulated is None


def test_the_recorder_holds_nothing() -> None:
    model, opt = make(lambda: markov.Residual(True), lr=0.1)
    seen: list[weakref.ref[Tensor]] = []
    on_every_call(model.a, lambda out: seen.append(weakref.ref(out)))
    step(model, opt, data(5))
    opt.zero_grad()
    gc.collect()
    assert len(seen) >= 2
    assert all(ref() is None for ref in seen)

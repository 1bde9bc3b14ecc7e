"""Code that may choose what it does is looked at in every pass, and so are odd modules, inputs and surroundings."""

from __future__ import annotations

import functools
import math
import random
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from tests.games.test_cues import Nothing
from tests.games.test_expected_chains import train
from tests.games.test_odd import IN, B, data, make
from tests.games.test_plain import Wired, code, helped, residual
from tests.games.test_settled import Looks
from tests.games.test_watched import unforeseen
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt.games import plain
from ocnopt.games.plain import Code

ON, BOX, SPACE = False, [False], types.SimpleNamespace(on=False)


def with_keyword(self: Any, z: Tensor, *, times: float = 1.0) -> Tensor:
    return z + times * self.b(self.a(z))


def with_list(self: Any, z: Tensor, times: Any = [1.0]) -> Tensor:  # noqa: B006
    return z + times[0] * self.b(self.a(z))


def of_list(self: Any, z: Tensor) -> Tensor:
    return z + (self.c if BOX[0] else self.b)(self.a(z))


def of_space(self: Any, z: Tensor) -> Tensor:
    return z + (self.c if SPACE.on else self.b)(self.a(z))


def of_chance(self: Any, z: Tensor) -> Tensor:
    return z + (self.c if random.random() > 2 else self.b)(self.a(z))


def of_state(self: Any, z: Tensor) -> Tensor:
    return z + (self.c if torch.is_grad_enabled() and self.on else self.b)(self.a(z))


def counting(self: Any, z: Tensor) -> Tensor:
    self.k += 1
    return z + self.b(self.a(z))


def in_a_context(self: Any, z: Tensor) -> Tensor:
    with torch.enable_grad():
        return z + self.b(self.a(z))


def trying(self: Any, z: Tensor) -> Tensor:
    try:
        return z + self.b(self.a(z))
    except RuntimeError:
        return z


def importing(self: Any, z: Tensor) -> Tensor:
    from math import sqrt

    return z + sqrt(2) * self.b(self.a(z))


def closing(over: Any) -> Callable[..., Any]:
    def block(self: Any, z: Tensor) -> Tensor:
        return z + self.b(over(self.a(z)))

    return block


@functools.wraps(helped)
def wrapped(*args: Any) -> Any:
    return helped(*args)


def of_its_own(self: Any, z: Tensor) -> Tensor:
    return z + of_its_own.times * self.b(self.a(z))  # type: ignore[attr-defined]


def with_attributes(self: Any, z: Tensor) -> Tensor:
    return z + self.b(self.a(z))


of_its_own.times = 1.0  # type: ignore[attr-defined]
with_attributes.on = True  # type: ignore[attr-defined]


def of_dictionary(self: Any, z: Tensor) -> Tensor:
    return z + self.b(self.a(z)) * len(self.__dict__)


def of_hooks(self: Any, z: Tensor) -> Tensor:
    return z + self.b(self.a(z)) * (1 + len(self._backward_hooks))


def of_parent(self: Any, z: Tensor) -> Tensor:
    return Wired.block(self, z)


def of_tag(self: Any, z: Tensor) -> Tensor:
    return z + self.b(self.a(z)) * z.tag


def by_torch(self: Any, z: Tensor) -> Tensor:
    return z + self.get_submodule("b")(self.a(z))


def told(self: Any, z: Tensor) -> Tensor:
    return z + (self.b if z.sum() > -1e9 else self.c)(self.a(z))


def told_in_passing(self: Any, z: Tensor) -> Tensor:
    return z + self.b(self.a(z)) * (1 + 0 * math.floor(z.sum().item()))


def told_where(self: Any, z: Tensor) -> Tensor:
    return z + self.b(self.a(z)) * (1 + 0 * z.flatten()[z.flatten() > 0].shape[0])


def shaped(self: Any, z: Tensor) -> Tensor:
    return z + self.b(self.a(z)).reshape(-1, self.width)


def told_gradients(self: Any, z: Tensor) -> Tensor:
    return z + (self.b if self.b.weight.requires_grad else self.c)(self.a(z))


def told_layout(self: Any, z: Tensor) -> Tensor:
    return z + (self.b if self.b.weight.is_contiguous() else self.c)(self.a(z))


def nothing_done(self: Any, z: Tensor) -> Tensor:
    return z.contiguous() + self.b(self.a(z))


def apart(self: Any, z: Tensor) -> Tensor:
    return z.detach() + self.b(self.a(z))


MAY_CHOOSE = (
    with_keyword, with_list, of_list, of_space, of_chance, of_state, counting, in_a_context, trying, importing,
    closing(torch.tanh), wrapped, of_its_own, with_attributes, of_dictionary, of_hooks, of_parent, by_torch, told,
    told_in_passing, told_where, shaped, told_gradients, told_layout, nothing_done, apart,
)  # fmt: skip


def _is_looked_at(build: Any, call: Callable[[nn.Module, Tensor], Any] = nn.Module.__call__) -> bool:
    model, opt = make(build, lr=0.1)
    for i in range(6):
        x, y = data(i)
        opt.zero_grad()
        with Looks() as looks:
            cross_entropy(call(model, x), y).backward()
        opt.step()
    return bool(looks.call_count)


@pytest.mark.parametrize("block", MAY_CHOOSE, ids=lambda block: block.__name__)
def test_code_that_may_choose_is_looked_at(block: Callable[..., Any]) -> None:
    assert _is_looked_at(code(block))


class Holding(Wired):
    things: Any

    def block(self, z: Tensor) -> Tensor:
        return z + self.b(self.a(z)) * (1.0 if self.things else 2.0)


class Listed(Holding):
    def __init__(self) -> None:
        super().__init__()
        self.things = [1]


class Nested(Holding):
    def __init__(self) -> None:
        super().__init__()
        self.things = ([1],)


class Counted(Holding):
    def __init__(self) -> None:
        super().__init__()
        self.things = type("Number", (int,), {})(3)


class Built(Wired):
    """What its code does not ask for may be anything."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_layer, self.sizes = nn.BatchNorm1d, [1]


class Asked(Wired):
    @property
    def layer(self) -> nn.Module:
        return self.c if ON else self.b

    def block(self, z: Tensor) -> Tensor:
        out: Tensor = z + self.layer(self.a(z))
        return out


class Answering(Wired):
    def __getattr__(self, name: str) -> Any:
        return self.b if name == "layer" else super().__getattr__(name)


class Intercepting(Wired):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("c" if name == "b" and ON else name)


class Calling(Wired):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


class Training(Wired):
    training: ClassVar[Any] = property(lambda self: True, lambda self, on: None)  # type: ignore[misc]


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight.t())


class WithOwn(Wired):
    """Nobody looks at what a player does inside."""

    def __init__(self) -> None:
        super().__init__()
        self.b = Own(4, 4)


class Loose(Wired):
    """It is a player itself, around others."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def block(self, z: Tensor) -> Tensor:
        return z + self.gain * self.b(self.a(z))


class Tagged(Wired):
    def __init__(self) -> None:
        super().__init__()
        self.tag = 1.0
        self.a.weight.tag = 1.0  # type: ignore[attr-defined]

    block = of_tag

    def forward(self, x: Tensor) -> Any:
        return self.head(self.block(self.into(x)) * self.a.weight.tag)


class Meta(type):
    pass


class OfMeta(Wired, metaclass=Meta):
    pass


@pytest.mark.parametrize(
    "kind",
    [Listed, Nested, Counted, Asked, Answering, Intercepting, Calling, Training, WithOwn, Loose, Tagged, OfMeta],
    ids=lambda kind: kind.__name__,
)
def test_odd_modules_are_looked_at(kind: Any) -> None:
    if kind is Tagged:
        kind = type("Plain", (Tagged,), {"block": residual})
    assert _is_looked_at(kind)


def _tagged(model: nn.Module, x: Tensor) -> Any:
    x.tag = 1.0  # type: ignore[attr-defined]
    return model(x)


class Pair(Wired):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        z = self.into(x if y is None else x + y)
        return self.head(self.block(z))


@pytest.mark.parametrize(
    ("call", "looked_at"),
    [
        (lambda model, x: model(x, 2 * x), False),
        (lambda model, x: model(x, x), True),
        (lambda model, x: model(x, y=x), True),
        (_tagged, True),
    ],
)
def test_what_it_is_given(call: Callable[[nn.Module, Tensor], Any], looked_at: bool) -> None:
    assert _is_looked_at(Pair, call) is looked_at


@pytest.mark.parametrize(("around", "looked_at"), [(Nothing, True), (lambda: torch.device("cpu"), False)])
def test_who_else_sees_operations(around: Callable[[], Any], looked_at: bool) -> None:
    """Another mode of the same kind may do something else."""

    def call(model: nn.Module, x: Tensor) -> Any:
        with around():
            return model(x)

    assert _is_looked_at(code(residual), call) is looked_at


def test_frozen_on_the_way() -> None:
    """What goes along an edge has no gradient any more."""
    found = []
    for may in (True, False):
        model, opt = make(code(residual), lr=0.1)
        with nullcontext() if may else unforeseen():
            steps = train(model, opt, 5)
            model.get_submodule("into").requires_grad_(False)
            found.append(steps + train(model, opt, 3, 5))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_an_instruction_that_is_not_known() -> None:
    """Of a later version of Python, say."""
    others = [Wired()]
    assert Code(others, []).is_plain
    plain._reads.cache_clear()
    with patch.object(plain, "_INSTRUCTIONS", plain._INSTRUCTIONS - {"RETURN_VALUE"}):
        assert not Code(others, []).is_plain
    plain._reads.cache_clear()


def test_parameters_in_another_order_of_memory_are_looked_at() -> None:
    """What was a view may be a copy."""

    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Conv2d(1, 4, 2), nn.Conv2d(4, 4, 1), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Any:
            z = self.a(x.reshape(B, 1, 1, IN).expand(B, 1, 2, IN))[..., :3]
            return self.head(torch.flatten(z + self.b(torch.tanh(z)), 1))

    model, opt = make(Image, lr=0.1)
    train(model, opt, 5)
    model.to(memory_format=torch.channels_last)
    with Looks() as looks:
        train(model, opt, 1)
    assert looks.call_count == 1

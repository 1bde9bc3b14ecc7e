"""Hooks of others: one that only looks sees a step once; one that changes something acts whenever the model runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.toys import (
    CLASSES,
    FEATURES,
    SOME_GAMES,
    assert_identical,
    backward,
    batches,
    mlp,
    name_of,
    train,
    values,
)
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import prune

from ocnopt import OCNOpt
from ocnopt.backwards import hook

NONLINEAR = [g for g in SOME_GAMES if g["feedback"] == "nonlinear"]
games = pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
nonlinear = pytest.mark.parametrize("game", NONLINEAR, ids=name_of)
when = pytest.mark.parametrize("attached_first", [False, True], ids=["hook first", "optimizer first"])


class Residual(nn.Module):
    """Runs stage by stage in the second pass, where a chain runs as its code is written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.act = nn.Linear(FEATURES, 4), nn.Linear(4, 4), nn.Tanh()
        self.head = nn.Linear(4, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        return self.head(x + self.act(self.inner(x)))


nets = pytest.mark.parametrize("net", [mlp, Residual], ids=["chain", "residual"])


@games
@nets
def test_a_hook_that_only_looks_sees_every_step_once(net: Callable[[], nn.Module], game: dict[str, Any]) -> None:
    model, plain = net(), net()
    opt, other = (OCNOpt(m.parameters(), 0.05, model=m, **game) for m in (model, plain))
    seen: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, args, out, name=name: seen.append(f"after {name}"))
        module.register_forward_hook(lambda m, args, out: out, always_call=True)  # what it was given changes nothing
        if module is not model:
            module.register_forward_pre_hook(lambda m, args, name=name: seen.append(f"before {name}"))
    data = batches(3)
    for x, y in data:
        opt.zero_grad()
        seen.clear()
        backward(model, x, y)
        once = list(seen)
        opt.step()
        assert seen == once
    train(plain, other, data)
    assert_identical(values(model), values(plain))
    seen.clear()
    with torch.no_grad():
        model(data[0][0])
    assert seen == once, "elsewhere they are called as ever"


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # torch's: the first input has no gradient
@games
@nets
def test_so_does_a_backward_hook(net: Callable[[], nn.Module], game: dict[str, Any]) -> None:
    """It puts functions of its own between the layers, so the network cannot run stage by stage any more."""
    model, plain = net(), net()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    other = OCNOpt(plain.parameters(), 0.05, model=plain, **game, state="accumulated")
    seen: list[str] = []
    for name, module in model.named_modules():
        module.register_full_backward_hook(lambda m, gi, go, name=name: seen.append(name))
    data = batches(4)
    for i, (x, y) in enumerate(data):
        opt.zero_grad()
        seen.clear()
        backward(model, x, y)
        once = list(seen)
        opt.step()
        assert seen == once != []
        if i == 0:  # from then on it is known, and what layers write is kept
            plain.load_state_dict(model.state_dict())
            other.load_state_dict(opt.state_dict())
            other.param_groups[0]["state"] = "accumulated"
    train(plain, other, data[1:])
    assert_identical(values(model), values(plain))
    if game["feedback"] == "nonlinear" and net is not mlp:
        assert "state: accumulated layer by layer" in opt.summary()


@pytest.fixture
def everywhere() -> Iterator[list[str]]:
    """Hooks on all modules there are."""
    seen: list[str] = []
    handles = [
        register_module_forward_hook(lambda m, args, out: seen.append(f"after {type(m).__name__}")),
        register_module_forward_pre_hook(lambda m, args: seen.append(f"before {type(m).__name__}")),
    ]
    yield seen
    for handle in handles:
        handle.remove()


@nonlinear
@nets
def test_so_does_a_hook_on_all_modules(net: Callable[[], nn.Module], game: dict[str, Any], everywhere: Any) -> None:
    model = net()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    backward(model, *batches()[0])
    once = list(everywhere)
    assert once
    opt.step()
    assert everywhere == once


class Doubled(nn.Module):
    """A layer, and as part of the network what a hook would do to it."""

    def __init__(self, layer: nn.Module, before: bool) -> None:
        super().__init__()
        self.layer, self.before = layer, before

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(2 * x) if self.before else 2 * self.layer(x)


def doubled_before(module: nn.Module, args: tuple[Tensor]) -> Tensor:
    return 2 * args[0]


def doubled_before_with_kwargs(module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> Any:
    return (2 * args[0],), kwargs


def doubled_after(module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
    return 2 * out


def doubled_in_place(module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
    out.mul_(2)


CHANGES: list[tuple[str, Any, dict[str, Any]]] = [
    ("register_forward_pre_hook", doubled_before, {}),
    ("register_forward_pre_hook", doubled_before_with_kwargs, {"with_kwargs": True}),
    ("register_forward_pre_hook", doubled_before, {"prepend": True}),
    ("register_forward_hook", doubled_after, {}),
    ("register_forward_hook", doubled_after, {"prepend": True}),
    ("register_forward_hook", doubled_in_place, {}),
]


@when
@pytest.mark.parametrize(("kind", "hook", "how"), CHANGES, ids=[f"{h.__name__} {o}" for _, h, o in CHANGES])
@games
def test_a_hook_that_changes_something_is_part_of_the_network(
    game: dict[str, Any], kind: str, hook: Any, how: dict[str, Any], attached_first: bool
) -> None:
    """The steps are those of a network that has the change written into it; registered after ``attach`` as well."""
    model, plain = mlp(), mlp()
    if not attached_first:
        getattr(model[1][0], kind)(hook, **how)
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    if attached_first:
        getattr(model[1][0], kind)(hook, **how)
    plain[1][0] = Doubled(plain[1][0], "pre" in kind)
    other = OCNOpt(plain.parameters(), 0.05, model=plain, **game)
    for batch in batches(3):
        train(model, opt, [batch])
        train(plain, other, [batch])
        torch.testing.assert_close(values(model), values(plain), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(opt.diagnostics.s, other.diagnostics.s, rtol=1e-6, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*left out by its adapter")
@nonlinear
def test_a_hook_that_computes_weights_acts_again(game: dict[str, Any]) -> None:
    """Pruning puts ``weight`` in place before each call, and returns nothing: a second pass needs the new one."""
    model = mlp()
    prune.l1_unstructured(model[1][0], "weight", amount=0.5)
    opt = OCNOpt(model.parameters(), 0.5, model=model, momentum=0.0, **game)
    train(model, opt, batches(2))
    layer = model[1][0]
    assert_identical(layer.weight.detach(), (layer.weight_orig * layer.weight_mask).detach())


@nonlinear
def test_a_hook_that_does_not_always_change_something(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    calls: list[bool] = []
    active: list[bool] = []

    def sometimes(module: nn.Module, args: Any, out: Tensor) -> Tensor | None:
        calls.append(active[-1])
        return 2 * out if active[-1] else None

    model[0][0].register_forward_hook(sometimes)
    counts = []
    for now in (False, True, False):
        active.append(now)
        calls.clear()
        train(model, opt, batches(1))
        counts.append(len(calls))
    assert counts[0] == counts[2] == 1
    assert counts[1] > 1


@games
def test_hooks_are_where_they_were(game: dict[str, Any]) -> None:
    """Also after a pass that failed; and one that removes itself is gone."""
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    hooks = [lambda *_: None for _ in range(4)]
    model[0][0].register_forward_hook(hooks[0])
    model[0][0].register_forward_pre_hook(hooks[1])
    model.register_forward_hook(hooks[2])
    once = model[1][0].register_forward_hook(lambda *_: once.remove())
    theirs = lambda: [  # noqa: E731
        h for m in model.modules() for d in (m._forward_hooks, m._forward_pre_hooks) for h in d.values() if h in hooks
    ]
    before = theirs()
    assert len(before) == 3
    train(model, opt, batches(2))
    assert theirs() == before
    assert once.id not in model[1][0]._forward_hooks
    with pytest.raises(RuntimeError):
        model(torch.zeros(3, FEATURES + 1, dtype=torch.float64))
    assert theirs() == before
    with pytest.raises(KeyboardInterrupt):
        interrupt(model)
    opt.zero_grad()
    assert theirs() == before


def interrupt(model: nn.Sequential) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model[1][0].register_forward_hook(stop)
    try:
        model(batches()[0][0])
    finally:
        handle.remove()


@games
def test_a_removed_hook_is_let_go(game: dict[str, Any]) -> None:
    class Listener:
        def __call__(self, *_: Any) -> None:
            return None

    model, listener = mlp(), Listener()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    handle = model[0][0].register_forward_hook(listener)
    train(model, opt, batches(2))
    handle.remove()
    train(model, opt, batches(1))
    there = weakref.ref(listener)
    del listener
    gc.collect()
    assert there() is None


@games
def test_activations_are_kept_by_a_hook_as_they_were_in_the_first_pass(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.5, model=model, **game)
    kept: dict[str, Tensor] = {}
    model[1].register_forward_hook(lambda m, args, out: kept.update(features=out))
    backward(model, *batches()[0])
    features = kept["features"]
    opt.step()
    assert kept["features"] is features
    assert features.requires_grad


@games
def test_backward_hooks_of_modules_may_change_gradients(game: dict[str, Any]) -> None:
    """The step is that of a network in which the gradient is changed by an operation."""

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad / 2

    class Halving(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Halved.apply(x)

    model, plain = mlp(), mlp()
    model[1][0].register_full_backward_pre_hook(lambda m, grads: (grads[0] / 2,))
    plain[1] = nn.Sequential(plain[1][0], Halving(), plain[1][1])
    for net in (model, plain):
        train(net, OCNOpt(net.parameters(), 0.05, model=net, **game), batches(2))
    torch.testing.assert_close(values(model), values(plain), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("before", [False, True])
def test_a_hook_on_what_a_layer_returns_joins_those_of_others(before: bool) -> None:
    seen: list[str] = []
    t = torch.ones(2, requires_grad=True) * 3
    if before:
        t.register_hook(lambda _: seen.append("before"))
    hook(t, lambda _: seen.append("ours"))
    after = t.register_hook(lambda h: seen.append("after"))
    t.sum().backward(retain_graph=True)
    expected = ["before", "ours", "after"][1 - before :]
    assert seen == expected
    assert len(t._backward_hooks) == len(expected)  # in one place, where torch looks for them
    after.remove()
    t.sum().backward()
    assert seen == [*expected, *expected[:-1]]

"""Chains of torch's own modules: as long as they are set as they were, nobody looks at what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.emulated import emulate
from tests.games.test_expected_chains import train
from tests.games.test_odd import CLASSES, IN, make
from tests.games.test_watched import unforeseen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ocnopt import OCNOpt
from ocnopt.games.recorder import Recorder


def chain() -> nn.Sequential:
    inner = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ELU(0.7))
    return nn.Sequential(
        nn.Linear(IN, 6), nn.LeakyReLU(0.2), nn.Dropout(0.0), inner, nn.Flatten(), nn.Linear(6, CLASSES)
    )


class Looks:
    """Counts the passes that are looked at, operation by operation."""

    def __init__(self) -> None:
        self._patch = patch.object(Recorder, "finish", autospec=True, side_effect=Recorder.finish)

    def __enter__(self) -> Any:
        return self._patch.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._patch.__exit__(*raised)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("curvature", ["identity", "kronecker"])
def test_nobody_looks(rank: int, curvature: str, needs_grad: bool) -> None:
    found = []
    for may in (True, False):
        model, opt = make(chain, lr=0.1, rank=rank, curvature=curvature)
        if may:
            steps = train(model, opt, 4, 0, needs_grad)
            with Looks() as looks:
                steps += train(model, opt, 4, 7, needs_grad)
            assert looks.call_count == 0
        else:
            with unforeseen():
                steps = [*train(model, opt, 4, 0, needs_grad), *train(model, opt, 4, 7, needs_grad)]
        found.append(steps)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


class Doubling(TorchFunctionMode):
    """Somebody has a say in what functions do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is torch.nn.functional.leaky_relu else out


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


def _set(place: Callable[[Any], Any], name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(place(model), name, value)


def _hook(model: nn.Sequential) -> None:
    model[1].register_forward_hook(lambda module, args, out: 1.5 * out)


def _replace(model: nn.Sequential) -> None:
    model[1] = nn.ELU().double()


def _foreign(model: nn.Sequential) -> None:
    model[1] = Squared()


CHANGES: dict[str, Callable[[Any], None]] = {
    "slope": _set(lambda m: m[1], "negative_slope", 0.6),
    "in an inner one": _set(lambda m: m[3][2], "alpha", 1.9),
    "eps": _set(lambda m: m[3][1], "eps", 0.5),
    "mode": lambda m: m.eval(),
    "dropout": _set(lambda m: m[2], "p", 0.5),
    "forward": _set(lambda m: m[1], "forward", torch.tanh),
    "hook": _hook,
    "hook on gradients": lambda m: m[1].register_full_backward_hook(lambda module, into, out: (3 * into[0],)),
    "replaced": _replace,
    "foreign": _foreign,
    "taken out": lambda m: m.__delitem__(1),
    "frozen": lambda m: m[3].requires_grad_(False),
}


def _with_and_without_looking(rank: int, then: Callable[[nn.Module, OCNOpt], list[Any]]) -> None:
    """After steps that came from graphs, and after ordinary ones in which nothing was expected."""
    found = []
    for may in (True, False):
        torch.manual_seed(0)
        model, opt = make(chain, lr=0.1, rank=rank, graphed=None if may else False)
        with nullcontext() if may else unforeseen():
            train(model, opt, 14)
            assert opt._replays.reason is None or not may
            found.append(then(model, opt))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_setting(change: Callable[[Any], None], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a module, or of what the model is made of: from the next pass on all is as if nothing had been expected."""
    emulate(monkeypatch)

    def then(model: nn.Module, opt: OCNOpt) -> list[Any]:
        change(model)
        return train(model, opt, 10, 20)

    _with_and_without_looking(rank, then)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """As ``patch.object``, where nothing can be deleted."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Other(nn.LeakyReLU):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


PATCHES: dict[str, Callable[[nn.Module], Any]] = {
    "forward of a class": lambda m: patch.object(nn.LeakyReLU, "forward", lambda self, x: torch.tanh(x)),
    "function": lambda m: patch.object(nn.functional, "leaky_relu", lambda x, *_: torch.tanh(x)),
    "class of a module": lambda m: replaced(m[1], "__class__", Other),  # type: ignore[index]
    "call": lambda m: patch.object(nn.Module, "__call__", lambda self, x: self._call_impl(2 * x)),
}


@pytest.mark.parametrize("patched", PATCHES.values(), ids=PATCHES)
def test_another_function_of_torch(patched: Callable[[nn.Module], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)

    def then(model: nn.Module, opt: OCNOpt) -> list[Any]:
        with patched(model):
            found = train(model, opt, 3, 20)
        return found + train(model, opt, 3, 30)

    _with_and_without_looking(1, then)


@pytest.mark.parametrize("around", [Doubling, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["mode", "autocast"])
def test_something_around_it(around: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)

    def then(model: nn.Module, opt: OCNOpt) -> list[Any]:
        with around():
            return train(model, opt, 3, 20)

    _with_and_without_looking(1, then)


class Choosing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square() if x.sum().item() > 0 else x.square().square()


@pytest.mark.parametrize(("middle", "looked_at"), [(Squared, 0), (Choosing, 2)])
def test_code_of_others_is_looked_at_if_it_may_choose(middle: Callable[[], nn.Module], looked_at: int) -> None:
    model, opt = make(lambda: nn.Sequential(nn.Linear(IN, 5), middle(), nn.Linear(5, CLASSES)), lr=0.1)
    train(model, opt, 4)
    with Looks() as looks:
        train(model, opt, 2, 7)
    assert looks.call_count == looked_at


def test_a_list_among_the_settings_is_looked_at() -> None:
    """It may be changed without being replaced."""
    pool = nn.AdaptiveAvgPool1d([4])  # type: ignore[arg-type]
    model, opt = make(lambda: nn.Sequential(nn.Linear(IN, 6), pool, nn.Linear(4, CLASSES)), lr=0.1)
    train(model, opt, 4)
    with Looks() as looks:
        train(model, opt, 1, 7)
    assert looks.call_count == 1


def test_a_pass_that_raises_is_no_pass() -> None:
    """The next one is as if it had not been."""
    found = []
    for fails in (True, False):
        model, opt = make(chain, lr=0.1)
        train(model, opt, 4)
        if fails:
            with pytest.raises(RuntimeError, match="shapes"):
                model[3](torch.zeros(4, 7, dtype=torch.float64))
            bad = patch.object(nn.ELU, "forward", side_effect=KeyboardInterrupt)
            with bad, pytest.raises(KeyboardInterrupt):
                model(torch.zeros(4, IN, dtype=torch.float64))
        found.append(train(model, opt, 3, 7))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)

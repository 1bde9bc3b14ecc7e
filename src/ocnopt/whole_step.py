"""Is a training step being captured in a CUDA graph, from the forward pass to the last update or ``opt.step()`` alone?

Then nothing runs until all of it is written down, and whoever captures has made sure that no random number must be
drawn a second time. From the forward pass on, nobody comes between the backward pass and the step either. What guards
against these can be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Capture:
    """Of one step: what its graph reads and was not made by it, or only once. It lives as long as the graph does."""

    whole: bool = True  # from the forward pass on
    pointing: bool = False  # is it told before each replay where gradients are?
    kept: list[Any] = field(default_factory=list)
    made: dict[Hashable, Any] = field(default_factory=dict)
    later: list[Callable[[], object]] = field(default_factory=list)  # to be done once, when all is captured


_underway: Capture | None = None
_announced = False
_rates: Mapping[int, Tensor] = {}  # where step sizes are read, by id of the group
_forever = Capture()  # of a graph that somebody else captures nobody knows how long it lives


def underway() -> bool:
    return _underway is not None


def undisturbed() -> bool:
    """Is it certain that nobody comes between the backward pass and the step?"""
    return _underway is not None and _underway.whole


def may_look(t: Tensor) -> bool:
    """Is a number at hand, and nobody going to replay what is made of it?"""
    return t.device.type == "cpu" and _underway is None


def pointing() -> bool:
    """Are gradients going to be somewhere else at each replay, and kernels told where?"""
    return _underway is not None and _underway.pointing


def rate(group: Mapping[str, Any]) -> float | Tensor:
    """The step size of a parameter group, or where a graph is going to read it."""
    lr: float | Tensor = _rates.get(id(group), group["lr"])
    return lr


def capturing() -> bool:
    """Is anything being captured, by us or by somebody else?"""
    return _underway is not None or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def keep(*things: Any) -> None:
    """A graph that is being captured, if any, is going to read these."""
    if capturing():
        (_underway or _forever).kept.append(things)


def afterwards(act: Callable[[], object]) -> None:
    """When the step that is being captured is, and before it first runs."""
    assert _underway is not None
    _underway.later.append(act)


def remembered(function: Callable[P, T]) -> Callable[P, T]:
    """Tensors that are made once and used often, by graphs too."""
    known = lru_cache(maxsize=64)(function)

    @wraps(function)
    def found(*args: P.args, **kwargs: P.kwargs) -> T:
        made: T = known(*args, **kwargs)  # type: ignore[arg-type]
        keep(made)
        return made

    return found


def once(key: Hashable, make: Callable[[], T]) -> T:
    """What a step that is captured makes one of, and anything else one for each use."""
    if _underway is None:
        return make()
    if key not in _underway.made:
        _underway.made[key] = make()
    found: T = _underway.made[key]
    return found


def announced() -> bool:
    """Is a whole step being captured, or one made that prepares for it?"""
    return _announced or undisturbed()


@contextmanager
def to_come() -> Iterator[None]:
    """Run a block that does what is going to be captured."""
    global _announced
    before, _announced = _announced, True
    try:
        yield
    finally:
        _announced = before


@contextmanager
def reading(rates: Mapping[int, Tensor]) -> Iterator[None]:
    """Run a block in which step sizes are read there, by id of the group."""
    global _rates
    before, _rates = _rates, rates
    try:
        yield
    finally:
        _rates = before


@contextmanager
def captured(capture: Capture | None = None) -> Iterator[Capture]:
    global _underway
    before, _underway = _underway, capture or Capture()
    try:
        yield _underway
    finally:
        _underway = before

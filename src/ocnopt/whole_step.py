"""Is a whole training step being captured in a CUDA graph, from the forward pass to the last update?

Then nothing runs until all of it is written down, nobody comes between the backward pass and the step, and whoever
captures has made sure that no random number must be drawn a second time. What guards against these can be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Capture:
    """Of one step: what its graph reads and was not made by it, or only once. It lives as long as the graph does."""

    kept: list[Any] = field(default_factory=list)
    made: dict[Hashable, Any] = field(default_factory=dict)


_underway: Capture | None = None
_forever = Capture()  # of a graph that somebody else captures nobody knows how long it lives


def underway() -> bool:
    return _underway is not None


def capturing() -> bool:
    """Is anything being captured, a whole step or less?"""
    return _underway is not None or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def keep(*things: Any) -> None:
    """A graph that is being captured, if any, is going to read these."""
    if capturing():
        (_underway or _forever).kept.append(things)


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
    """What a whole step makes one of, and anything else one for each use."""
    if _underway is None:
        return make()
    if key not in _underway.made:
        _underway.made[key] = make()
    found: T = _underway.made[key]
    return found


@contextmanager
def captured() -> Iterator[Capture]:
    global _underway
    before, _underway = _underway, Capture()
    try:
        yield _underway
    finally:
        _underway = before

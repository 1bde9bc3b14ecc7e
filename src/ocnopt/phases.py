"""The parts of a step by name, for whoever wants to know where its time goes.

A phase is a context manager and a decorator. It tells a listener when it begins and ends; without a listener, which is
the rule, it does nothing: it launches no kernel and asks nothing of the device, so that a CUDA graph may be captured
through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Listener(Protocol):
    """Is told of phases. They may be nested, one inside another of the same name too."""

    def begin(self, name: str) -> None: ...

    def end(self, name: str) -> None: ...


_listener: Listener | None = None


class Phase:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def told_of(*args: P.args, **kwargs: P.kwargs) -> T:
            if _listener is None:
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return told_of

    def __enter__(self) -> None:
        if _listener is not None:
            _listener.begin(self.name)

    def __exit__(self, *raised: object) -> None:
        if _listener is not None:
            _listener.end(self.name)


def listening() -> bool:
    """Is anybody told?"""
    return _listener is not None


@contextmanager
def told(listener: Listener) -> Iterator[None]:
    """Tell this listener, and nobody else, of all phases in the block."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


GRADIENTS = Phase("gradients")  #: those of groups of samples, and whether all of them are finite
CURVATURE = Phase("curvature")  #: the statistics of the metric, and now and then its decompositions
BELLMAN = Phase("bellman")  #: kernels, the recursion, the answers of the policy
ROLLOUT = Phase("rollout")  #: the second forward pass, and what it measures
UPDATE = Phase("update")  #: momentum, metric, parameters

"""Functions that ``torch.compile`` must not look into.

``torch.compiler.disable`` is the way to say so, but it turns the compiler off and on around every call, which takes
longer than most hooks do. Here that is done only where a compiler is at work.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.overrides import TorchFunctionMode

F = TypeVar("F", bound=Callable[..., Any])

compiler = get_eval_frame_callback  #: ``None``: none is at work

_apart: list[Callable[..., Any]] = []


def apart(act: F) -> F:
    """A decorator of what begins with ``if compiler() is not None: return disabled(…)(…)``: a compiler calls it instead
    of following it. That it does not compile it then is seen to by :func:`prepare`.
    """
    act._torchdynamo_disable = True  # type: ignore[attr-defined]
    _apart.append(act)
    return act


@cache
def prepare() -> None:
    """To be called before any of them is."""
    from torch._dynamo.decorators import skip

    for act in _apart:
        skip(act)


_calls = 0  # of ours that are under way in compiled code


def called_by(act: Callable[..., Any], *args: Any) -> Any:
    """``act(*args)``, of compiled code."""
    global _calls
    _calls += 1
    try:
        return act(*args)
    finally:
        _calls -= 1


def is_at_work() -> bool:
    """Is a compiler, or code that it has made, where a function of ours was called?"""
    return compiler() is not None or _calls > 0


@cache
def disabled(act: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with no compiler at work in it."""
    found: Callable[..., Any] = torch.compiler.disable(act)
    return found


class Unfollowed(TorchFunctionMode):
    """A mode whose functions :meth:`_see` is told of, those of compiled code too, and that no compiler follows."""

    @apart
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        see = type(self)._see
        return (see if compiler() is None else disabled(see))(self, func, args, kwargs or {})

    def _see(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

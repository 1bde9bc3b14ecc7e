"""The vector field as the solver sees it: every evaluation is counted, checked and remembered until the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ocnopt.ode.strays import Strays
from ocnopt.rng import RNGState

#: x_t: a tensor, or a tuple of tensors that are integrated together
State = Tensor | tuple[Tensor, ...]


@dataclass
class Evaluations:
    """How often the field was evaluated since the last :meth:`reset`.

    ``forward`` counts forward passes of any kind, ``backward`` what a backward pass evaluates again (the adjoint
    solve, or the segments between checkpoints), ``curvature`` the second-order statistics of refresh steps.
    """

    forward: int = 0
    backward: int = 0
    curvature: int = 0

    def reset(self) -> None:
        self.forward = self.backward = self.curvature = 0


class Field:
    """F(t, x): calls the module, in the dtype of the state, and knows how far the solver has come."""

    def __init__(self, module: nn.Module, nfe: Evaluations, strays: Strays) -> None:
        self.module, self.nfe, self._strays = module, nfe, strays
        self.collecting = False
        self.rng: RNGState | None = None  # with which every evaluation begins, if given: one field, not a new one each
        self.t: Tensor | None = None  # of the last evaluation
        self.first_t: Tensor | None = None  # and of the first one
        self.value: tuple[Tensor, ...] | None = None  # its result
        self.inside = False  # is the module running?
        self._stop_when_bad = False

    def __getattr__(self, name: str) -> Any:
        # torchdiffeq looks for callbacks (``callback_step`` and its like) on the function it is given
        if name.startswith("callback_"):
            return getattr(self.module, name)
        raise AttributeError(name)

    def __call__(self, t: Tensor, x: State) -> State:
        self._count()
        self.t, self.inside = t.detach(), True
        self.first_t = self.t if self.first_t is None else self.first_t
        with self._strays.expected(), nullcontext() if self.rng is None else self.rng.restored():
            value = _like(self.module(t, x), x, self.module)
        self.value, self.inside = tuple(v.detach() for v in as_tuple(value)), False
        if self._stop_when_bad and not finite(self.value):
            raise NotFinite
        return value

    def _count(self) -> None:
        if self.collecting:
            self.nfe.curvature += 1
        elif torch._C._current_graph_task_id() != -1:
            self.nfe.backward += 1
        else:
            self.nfe.forward += 1

    def forget(self) -> None:
        self.t, self.first_t, self.value = None, None, None

    @contextmanager
    def stopping_when_not_finite(self) -> Iterator[None]:
        """Evaluations raise :class:`NotFinite` as soon as they give something that is not a number."""
        self._stop_when_bad = True
        try:
            yield
        finally:
            self._stop_when_bad = False


class NotFinite(Exception):
    """The field has just given a value that is infinite or not a number."""


def as_tuple(x: State) -> tuple[Tensor, ...]:
    return (x,) if isinstance(x, Tensor) else x


def finite(x: State) -> bool:
    return all(bool(part.isfinite().all()) for part in as_tuple(x))


def _like(value: Any, x: State, module: nn.Module) -> State:
    """The value of the field in the dtype of the state (autocast may have changed it), if it fits the state."""
    values, states = (value,) if isinstance(value, Tensor) else value, as_tuple(x)
    if not isinstance(values, tuple | list) or [v.shape for v in values] != [s.shape for s in states]:
        got = [tuple(v.shape) for v in values] if isinstance(values, tuple | list) else type(values).__name__
        wanted = [tuple(s.shape) for s in states]
        raise ValueError(f"field {type(module).__name__} must return dx/dt in the shape of x, {wanted}, got {got}")
    same = tuple(v.to(s.dtype) for v, s in zip(values, states, strict=True))
    return same[0] if isinstance(x, Tensor) else same

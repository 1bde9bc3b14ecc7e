"""Calls of torchdiffeq: plain, with checkpoints, with the adjoint method. Failures get a name."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from torchdiffeq import odeint, odeint_adjoint
from torchdiffeq._impl.odeint import SOLVERS
from torchdiffeq._impl.rk_common import RKAdaptiveStepsizeODESolver
from torchdiffeq._impl.solvers import FixedGridODESolver

from ocnopt.ode.field import Field, NotFinite, State, as_tuple, finite
from ocnopt.ode.options import takes_one_step

#: all methods of the installed torchdiffeq
METHODS: tuple[str, ...] = tuple(SOLVERS)
#: those that choose their own steps
ADAPTIVE: tuple[str, ...] = tuple(
    name for name, kind in SOLVERS.items() if issubclass(kind, RKAdaptiveStepsizeODESolver)
)
#: solved outside torch: nothing to differentiate
WITHOUT_GRADIENT = ("scipy_solver",)


class SolverError(RuntimeError):
    """An ODE could not be solved. The message names the block, the time and what to try."""


@dataclass(frozen=True)
class Solver:
    """The settings of a block, as torchdiffeq takes them. ``adjoint`` are the arguments of the backward solve."""

    method: str
    rtol: float
    atol: float
    options: Mapping[str, Any] | None = None
    adjoint: Mapping[str, Any] = field(default_factory=dict)

    @property
    def adaptive(self) -> bool:
        return self.method in ADAPTIVE

    @property
    def _arguments(self) -> dict[str, Any]:
        options = None if self.options is None else dict(self.options)
        return {"method": self.method, "rtol": self.rtol, "atol": self.atol, "options": options}

    def plainest(self) -> Solver:
        """One evaluation of the field from one time to the next."""
        return Solver("euler", self.rtol, self.atol)

    def described(self, phase: str) -> str:
        """The arguments of a solve as the user gave them."""
        if phase == "forward":
            return f"solver={self.method!r} with options={self.options!r}"
        return f"solver={self._backward_method!r} with options={self._backward_options!r}"

    def why_coarse(self, times: Sequence[float], adjoint: bool) -> str | None:
        """Which solve takes one step over the whole interval, and what to do, or ``None`` if none does."""
        solves = [("solver", self.method, "options", self.options)]
        if adjoint:
            solves.append(("adjoint_solver", self._backward_method, "adjoint_options", self._backward_options))
        for argument, method, name, options in solves:
            if takes_one_step(method, options, times):
                way = f"give {name}={{'step_size': ...}}, or more times than two"
                return f"{argument}={method!r} takes a single step from t = {times[0]:g} to {times[-1]:g}: {way}"
        return None

    @property
    def _backward_method(self) -> str:
        return self.adjoint.get("adjoint_method") or self.method

    @property
    def _backward_options(self) -> Mapping[str, Any] | None:
        options: Mapping[str, Any] | None = self.adjoint.get("adjoint_options")
        return self.options if options is None else options

    def plain(self, F: Callable[[Tensor, Any], Any], x: State, times: Tensor) -> State:
        """The states at all times, differentiable through the solver's own steps."""
        return cast(State, odeint(F, x, times, **self._arguments))

    def backward(self, F: Callable[[Tensor, Any], Any], x: tuple[Tensor, ...], times: Tensor) -> tuple[Tensor, ...]:
        """A solve backward in time with the settings of the adjoint. Its state is larger, so ``norm`` is left out."""
        options = {k: v for k, v in (self._backward_options or {}).items() if k != "norm"}
        method = self._backward_method
        if issubclass(SOLVERS[method], FixedGridODESolver):
            options.setdefault("interp", "cubic")  # the times asked for are between the points of the grid
        return cast(
            tuple[Tensor, ...],
            odeint(
                F, x, times,
                method=method,
                rtol=_first(self.adjoint.get("adjoint_rtol"), self.rtol),
                atol=_first(self.adjoint.get("adjoint_atol"), self.atol),
                options=options,
            ),
        )  # fmt: skip

    def with_adjoint(self, F: Field, x: State, times: Tensor, parameters: Sequence[Tensor]) -> State:
        """The states at all times; the backward pass solves the adjoint equation."""
        arguments = dict(self.adjoint, adjoint_params=tuple(parameters))
        return cast(State, odeint_adjoint(F, x, times, **self._arguments, **arguments))


def _first(a: float | None, b: float) -> float:
    return b if a is None else a


@contextmanager
def named_failures(name: str, F: Field, phase: str, solver: Solver) -> Iterator[None]:
    """Turn what torchdiffeq asserts into a :class:`SolverError`, and what it objects to before the first evaluation of
    the field, which is about its arguments, into a :class:`ValueError`.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        if F.inside:  # the field's own
            raise
        if F.t is None:
            raise ValueError(f"{name}: torchdiffeq does not take {solver.described(phase)}: {_said(error)}") from error
        if not isinstance(error, AssertionError):
            raise
        raise SolverError(_message(name, F, phase, _said(error))) from error
    finally:
        F.forget()


def _said(error: Exception) -> str:
    return str(error) or f"{type(error).__name__} in {traceback.extract_tb(error.__traceback__)[-1].name}"


def _message(name: str, F: Field, phase: str, what: str) -> str:
    reached = next((float(t) for t in (F.t, F.first_t) if t is not None and t.isfinite()), None)
    at = "" if reached is None else f" at t = {reached:.6g}"
    if F.value is not None and not finite(F.value):
        what = "the field is not finite"
    elif "non-finite" in what:
        what = "the state is not finite"
    return (
        f"{name}: the {phase} solve failed{at} ({what}); try looser rtol and atol, options={{'min_step': ...}} or a "
        f"fixed grid (solver='rk4', options={{'step_size': ...}}), gradient='discretize' if only the adjoint solve "
        f"fails, a smaller learning rate or weight decay if the field has grown too steep"
    )


def check_finite(name: str, F: Field, phase: str, solution: State, again: Callable[[], Any]) -> None:
    """Solvers with a fixed grid go on with whatever they get: look at the end, and where it began only then."""
    if finite(solution):
        return
    try:
        with torch.no_grad(), F.stopping_when_not_finite():
            again()
    except (NotFinite, AssertionError):
        pass
    message = _message(name, F, phase, "the state is not finite")
    F.forget()
    raise SolverError(message)


class Adjoint(torch.autograd.Function):
    """torchdiffeq's adjoint method inside one node of the graph, so that a backward solve that fails has a name.

    The inner graph holds the solution at the asked times and nothing else: memory does not grow with the steps.
    """

    @staticmethod
    def forward(
        ctx: Any, solver: Solver, F: Field, name: str, times: Tensor, parts: int, tupled: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        states, parameters = tensors[:parts], tensors[parts:]
        ctx.F, ctx.name, ctx.solver = F, name, solver
        ctx.device = states[0].device.type
        ctx.autocast = (torch.is_autocast_enabled(ctx.device), torch.get_autocast_dtype(ctx.device))
        with torch.enable_grad():
            leaves = tuple(x.detach().requires_grad_(x.is_floating_point()) for x in states)
            with named_failures(name, F, "forward", solver):
                out = as_tuple(solver.with_adjoint(F, leaves if tupled else leaves[0], times, parameters))
        ctx.inner = out, (*leaves, *(p for p in parameters if p.requires_grad))
        ctx.wanted = [True] * parts + [p.requires_grad for p in parameters]
        return tuple(part.detach().clone() for part in out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        out, inputs = ctx.inner
        enabled, dtype = ctx.autocast
        found: Sequence[Tensor | None]
        if finite(gradients):
            with _named(ctx), torch.autocast(ctx.device, dtype, enabled):
                found = torch.autograd.grad(out, inputs, gradients, retain_graph=True, allow_unused=True)
            if not finite(tuple(g for g in found if g is not None)):
                raise SolverError(_message(ctx.name, ctx.F, "adjoint", "the adjoint is not finite"))
        else:  # nothing to solve, and no failure of the solver: whoever scales losses or skips bad batches must see it
            found = [torch.full_like(i, torch.nan) for i in inputs]
        rest = iter(found)
        return (None,) * 6 + tuple(next(rest) if wanted else None for wanted in ctx.wanted)


def _named(ctx: Any) -> AbstractContextManager[None]:
    return named_failures(ctx.name, ctx.F, "adjoint", ctx.solver)


def checkpointed(solver: Solver, F: Field, x: State, times: Tensor, segments: Sequence[Tensor]) -> State:
    """The states at all times with the graph of one segment at a time in memory."""
    wanted, kept = set(times.tolist()), [as_tuple(x)]

    def solve(piece: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        return as_tuple(solver.plain(F, state if isinstance(x, tuple) else state[0], piece))

    state = as_tuple(x)
    for piece in segments:
        rows = checkpoint(solve, piece, *state, use_reentrant=False)
        state = tuple(part[-1] for part in rows)
        kept += [tuple(part[i] for part in rows) for i, t in enumerate(piece.tolist()) if i and t in wanted]
    states = tuple(torch.stack(parts) for parts in zip(*kept, strict=True))
    return states if isinstance(x, tuple) else states[0]

"""NeuralODE: a module whose output is the solution of dx/dt = F(t, x, θ), eq. (node) of the paper."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ocnopt.environment import Buffers, in_mode
from ocnopt.hosts import CannotTell, Execution, Host
from ocnopt.layers.base import Call
from ocnopt.ode import times as time
from ocnopt.ode.field import Evaluations, Field, State, as_tuple
from ocnopt.ode.horizon import Horizon, LearnedHorizon
from ocnopt.ode.look import along_solve
from ocnopt.ode.options import check_options
from ocnopt.ode.quadrature import shared_out
from ocnopt.ode.solver import (
    METHODS,
    WITHOUT_GRADIENT,
    Adjoint,
    Solver,
    SolverError,
    check_finite,
    checkpointed,
    named_failures,
)
from ocnopt.ode.strays import Strays
from ocnopt.rng import RNGState
from ocnopt.trees import mapped

GRADIENTS = ("adjoint", "discretize")


class NeuralODE(Host):
    """Solves dx/dt = field(t, x) from the input at the first time to the output at the last one.

    Args:
        field: F, a module that is called as ``field(t, x)`` and returns dx/dt in the shape of ``x``. The state is a
            tensor, or a tuple of tensors if the block is called with one; samples are dimension 0.
        t: the time interval, or more times if the states in between are wanted, increasing or decreasing.
        solver: any method of the installed torchdiffeq: ``"dopri5"`` (Runge-Kutta 4(5)), ``"implicit_adams"``
            (Adams-Moulton), ``"rk4"``, ...
        rtol, atol: tolerances of the adaptive solvers.
        gradient: ``"adjoint"`` solves the adjoint equation backward in time: memory does not grow with the number of
            steps, the gradient is as exact as the tolerance. ``"discretize"`` differentiates the solver's steps: the
            exact gradient of what was computed, with all steps in memory.
        checkpoints: with ``"discretize"``, the number of segments that are computed again in the backward pass, one at
            a time: memory is that of one segment and the states between them, time one more forward solve.
        options: passed to torchdiffeq as it is (``step_size``, ``min_step``, ``max_num_steps``, ``norm``, ...).
        adjoint_options, adjoint_solver, adjoint_rtol, adjoint_atol: the same for the adjoint solve, if different.
            ``adjoint_options={"norm": "seminorm"}`` leaves the gradient of the parameters out of the error estimate,
            which saves steps.
        all_times: return the states at all times, stacked in dimension 0, instead of the last one.
        learn_horizon: learn the final time as well. Moved by the steps of an :class:`~ocnopt.OCNOpt` that is given the
            model, or of any optimizer after ``block.horizon.follow(optimizer, [*block.field.parameters()])``.
        nodes: of the quadrature along the solve when an optimizer measures curvature; 4 are nearly always enough. Many
            solves of one pass, or times with ``all_times``, share four times as many.
    """

    def __init__(
        self,
        field: nn.Module,
        t: time.Times = (0.0, 1.0),
        solver: str = "dopri5",
        rtol: float = 1e-5,
        atol: float = 1e-5,
        gradient: str = "adjoint",
        checkpoints: int | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        adjoint_options: Mapping[str, Any] | None = None,
        adjoint_solver: str | None = None,
        adjoint_rtol: float | None = None,
        adjoint_atol: float | None = None,
        all_times: bool = False,
        nodes: int = 4,
        learn_horizon: Horizon | None = None,
    ) -> None:
        super().__init__()
        _check_field(field)
        _check_choice("solver", solver, METHODS)
        _check_choice("gradient", gradient, GRADIENTS)
        if adjoint_solver is not None:
            _check_choice("adjoint_solver", adjoint_solver, METHODS)
        tolerances = {"rtol": rtol, "atol": atol, "adjoint_rtol": adjoint_rtol, "adjoint_atol": adjoint_atol}
        _check_tolerances(tolerances)
        check_options("options", options, solver)
        check_options("adjoint_options", adjoint_options, adjoint_solver or solver)
        adjoint = {
            "adjoint_options": None if adjoint_options is None else dict(adjoint_options),
            "adjoint_method": adjoint_solver,
            "adjoint_rtol": adjoint_rtol,
            "adjoint_atol": adjoint_atol,
        }
        self.field = field
        self.gradient, self.checkpoints, self.all_times = gradient, checkpoints, all_times
        self.solver = Solver(solver, rtol, atol, options, adjoint)
        _check_count("nodes", nodes)
        self.nodes = nodes
        self.nfe, self._strays = Evaluations(), Strays()
        self._said: set[str] = set()
        self._t = time.checked(t)
        self.horizon = None if learn_horizon is None else _horizon(learn_horizon, self._t)
        self._check_gradient(gradient, {k: v for k, v in adjoint.items() if v is not None}, checkpoints)

    def _check_gradient(self, gradient: str, adjoint: Mapping[str, Any], checkpoints: int | None) -> None:
        if gradient == "discretize" and self.solver.method in WITHOUT_GRADIENT:
            raise ValueError(f"solver={self.solver.method!r} runs outside torch: it needs gradient='adjoint'")
        if gradient == "discretize" and adjoint:
            raise ValueError(f"{next(iter(adjoint))} is about the adjoint solve, which gradient='discretize' has not")
        other = adjoint.get("adjoint_method", self.solver.method) != self.solver.method
        if other and self.solver.options is not None and "adjoint_options" not in adjoint:
            raise ValueError("adjoint_options must be given beside options if adjoint_solver is another solver")
        if checkpoints is None:
            return
        _check_count("checkpoints", checkpoints)
        if gradient != "discretize":
            raise ValueError("checkpoints are for gradient='discretize': the adjoint method keeps no steps")
        why = time.why_not_checkpointed(self._t, checkpoints, self.solver.options, self.solver.adaptive)
        if why is not None:
            raise ValueError(why)

    @property
    def t(self) -> tuple[float, ...]:
        """The times, the first and the last of which bound the interval."""
        return self._t if self.horizon is None else (self._t[0], self._t[0] + self.horizon.T)

    def forward(self, x: State, t: time.Times | None = None, all_times: bool | None = None) -> State:
        """x at the last time, or at all of them. ``t`` and ``all_times`` replace those of the block for this call."""
        _check_state(x)
        learns = t is None and self.training and torch.is_grad_enabled()
        _, times, all_times = self._asked(x, t, all_times)
        self._warn_once("steps", self.solver.why_coarse(times, torch.is_grad_enabled() and self.gradient == "adjoint"))
        states = self._solve(x, times)
        # with memory of its own: whoever writes to a view in place takes the hooks on it out of the graph
        final = mapped(lambda part: part[-1].clone(), states)
        whole = mapped(lambda part: part.clone() if part._is_view() else part, states)
        wanted: State = whole if all_times else final
        if learns and self.horizon is not None and not self.horizon.followed:
            self._warn_once("horizon", self.horizon.alone)
        elif learns and self.horizon is not None and self.horizon.due:
            self.horizon.watch(self.field, self._speed(times[-1], final), wanted, all_times)
        return wanted

    def _warn_once(self, about: str, what: str | None) -> None:
        if what is not None and about not in self._said:
            self._said.add(about)
            warnings.warn(f"{self.name}: {what}", stacklevel=5)  # from forward, which torch calls from two of its own

    def _speed(self, T: float, final: State) -> State:
        """F(T, x_T)."""
        x = tuple(part.detach() for part in as_tuple(final))
        with torch.no_grad():
            return self._F()(time.on_device((T,), x[0])[0], x[0] if isinstance(final, Tensor) else x)

    def _F(self) -> Field:
        return Field(self.field, self.nfe, self._strays)

    def _solve(self, x: State, times: tuple[float, ...]) -> State:
        why = time.why_not_apart(times, as_tuple(x)[0].dtype)
        if why is not None:
            raise ValueError(f"{self.name}: {why}")
        F, at = self._F(), time.on_device(times, as_tuple(x)[0])
        # nobody can choose a step by the error of nothing
        solver = self.solver if any(part.numel() for part in as_tuple(x)) else self.solver.plainest()
        if torch.is_grad_enabled() and self.gradient == "adjoint":
            parts = as_tuple(x)
            tupled = not isinstance(x, Tensor)
            found = Adjoint.apply(solver, F, self.name, at, len(parts), tupled, *parts, *self.field.parameters())  # type: ignore[no-untyped-call]
            found = tuple(part.view_as(part) for part in found)  # each with a node of its own
            states: State = found if tupled else found[0]
        else:
            with named_failures(self.name, F, "forward", solver):
                if self.checkpoints is not None:  # also without gradients: the steps must be the same
                    states = checkpointed(solver, F, x, at, self._segments(times, at))
                else:
                    states = solver.plain(F, x, at)
        check_finite(self.name, F, "forward", states, lambda: solver.plain(F, x, at))
        return states

    # --- for the optimizer ---

    def attached(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        super().attached(optimizer, name)
        self._strays.watch(self, optimizer)
        if self.horizon is not None:
            self.horizon.follow(optimizer, list(self.field.parameters()))

    def detached(self, optimizer: torch.optim.Optimizer) -> None:
        self._strays.leave(optimizer)
        if self.horizon is not None:
            self.horizon.leave(optimizer)

    def take_strays(self) -> frozenset[str]:
        return self._strays.take()

    def layer_calls(self, execution: Execution, layers: Mapping[str, nn.Module]) -> dict[str, list[Call]]:
        """What the layers of the field saw: their calls at the nodes of a quadrature along the solve."""
        x, times, all_times = self._asked(*execution.args, **execution.kwargs)
        parts = range(len(as_tuple(x)))
        if any(i not in execution.outputs for i in parts):
            raise CannotTell("its output was overwritten in place")
        states = [execution.outputs[i] for i in parts]
        adjoints = [execution.h[i] if i in execution.h else torch.zeros_like(states[i]) for i in parts]
        if not all_times:
            times = (times[0], times[-1])
        reached, jumps = (
            [tuple(part[k] for part in whole) for k in range(1, len(times))] if all_times else [tuple(whole)]
            for whole in (states, adjoints)
        )
        begun = None if execution.overwritten else tuple(part.detach() for part in as_tuple(x))
        F, tupled = self._F(), not isinstance(x, Tensor)
        F.collecting, F.rng = True, RNGState.capture({states[0].device})
        failures = named_failures(self.name, F, "curvature", self.solver)
        try:
            with self._without_trace(execution, states[0].device), self._strays.expected(), failures:
                nodes = shared_out(self.nodes, execution.of * (len(times) - 1))
                return along_solve(self.solver, F, times, [begun, *reached], jumps, tupled, nodes, layers)
        except SolverError as error:
            raise CannotTell(str(error)) from error

    def _asked(
        self, x: State, t: time.Times | None = None, all_times: bool | None = None
    ) -> tuple[State, tuple[float, ...], bool]:
        """The arguments of a call, with what the block itself says where they are silent."""
        times = self.t if t is None else time.checked(t)
        return x, times, self.all_times if all_times is None else all_times

    @contextmanager
    def _without_trace(self, execution: Execution, device: torch.device) -> Iterator[None]:
        """Evaluate the field as in that execution; random numbers and running statistics stay as they are."""
        buffers, dtype = Buffers(self), execution.autocast
        training = self.training if execution.training is None else execution.training
        try:
            with in_mode(self, training), torch.autocast(device.type, dtype, enabled=dtype is not None):
                yield
        finally:
            buffers.restore()

    def _segments(self, times: tuple[float, ...], at: Tensor) -> list[Tensor]:
        assert self.checkpoints is not None
        options, adaptive = self.solver.options or {}, self.solver.adaptive
        why = time.why_not_checkpointed(times, self.checkpoints, options, adaptive)
        if why is not None:
            raise ValueError(f"{self.name}: {why}")
        return time.segments(at, self.checkpoints, options.get("step_size"), adaptive)

    @property
    def name(self) -> str:
        """As errors call the block: its name in the watched model, or else what it is made of."""
        return self.known_as or f"NeuralODE({type(self.field).__name__})"

    def extra_repr(self) -> str:
        t = f"t={self.t}" if len(self.t) == 2 else f"t=({self.t[0]}, ..., {self.t[-1]}), {len(self.t)} times"
        return f"{t}, solver={self.solver.method!r}, gradient={self.gradient!r}"


def _horizon(settings: Horizon, t: tuple[float, ...]) -> LearnedHorizon:
    if not isinstance(settings, Horizon):
        raise TypeError(f"learn_horizon must be a Horizon, got {type(settings).__name__}")
    if len(t) != 2 or t[0] > t[1]:
        raise ValueError(f"learn_horizon needs two times, the second of them later, got t={t}")
    return LearnedHorizon(settings, t[1] - t[0])


def _check_field(field: Any) -> None:
    if not isinstance(field, nn.Module):
        raise TypeError(f"field must be a torch.nn.Module that is called as field(t, x), got {type(field).__name__}")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number ≥ 1, got {value!r}")


def _check_tolerances(tolerances: Mapping[str, Any]) -> None:
    for name, value in tolerances.items():
        if value is None and name.startswith("adjoint"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a number > 0, got {value!r}")


def _check_state(x: Any) -> None:
    parts = x if isinstance(x, tuple) else (x,)
    if not parts or not all(isinstance(part, Tensor) and part.is_floating_point() for part in parts):
        raise TypeError(f"the state must be a floating-point tensor or a tuple of them, got {type(x).__name__}")

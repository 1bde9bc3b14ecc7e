"""The options of torchdiffeq's solvers. It warns of those that it does not know, and solves without them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torchdiffeq._impl.odeint import SOLVERS
from torchdiffeq._impl.solvers import FixedGridODESolver

#: given by torchdiffeq itself
_NOT_OPTIONS = ("self", "func", "y0", "rtol", "atol")


def options_of(solver: str) -> list[str]:
    """The options that a solver knows."""
    inits = [kind.__init__ for kind in SOLVERS[solver].__mro__ if "__init__" in vars(kind) and kind is not object]
    named = [p for init in inits for p in inspect.signature(init).parameters.values() if p.kind is not p.VAR_KEYWORD]
    return sorted({p.name for p in named if p.name not in _NOT_OPTIONS} | {"norm"})


def check_options(argument: str, options: Any, solver: str) -> None:
    """A misspelt ``step_size`` must not become one step over the whole interval."""
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise TypeError(f"{argument} must be a dict or None, got {type(options).__name__}")
    known = options_of(solver)
    for name in options:
        if name not in known:
            raise ValueError(f"{argument}: solver={solver!r} has no option {name!r}, only {', '.join(known)}")
    norm = options.get("norm")
    if norm is not None and not callable(norm) and not (argument == "adjoint_options" and norm == "seminorm"):
        seminorm = " or 'seminorm'" if argument == "adjoint_options" else ""
        raise ValueError(f"{argument}: norm must be a function of the state{seminorm}, got {norm!r}")


def takes_one_step(solver: str, options: Mapping[str, Any] | None, times: Sequence[float]) -> bool:
    """Over the whole interval, since nothing says where else a fixed grid has its points. (Of more times than two, the
    points are those.)
    """
    grid = options is not None and any(options.get(name) is not None for name in ("step_size", "grid_constructor"))
    return issubclass(SOLVERS[solver], FixedGridODESolver) and not grid and len(times) == 2

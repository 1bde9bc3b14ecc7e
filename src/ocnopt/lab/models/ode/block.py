"""Blocks of the lab's networks: solvers that choose their own steps, and solvers that must be told."""

from __future__ import annotations

from torch import nn

from ocnopt.ode import Horizon, NeuralODE
from ocnopt.ode.solver import ADAPTIVE


def ode_block(
    field: nn.Module,
    time: float,
    solver: str,
    rtol: float,
    atol: float,
    gradient: str,
    steps: int,
    horizon: Horizon | None = None,
) -> NeuralODE:
    """The flow of the field from 0 to ``time``; a solver with a fixed grid takes ``steps`` steps for it."""
    if not time > 0:
        raise ValueError(f"time must be greater than 0; got {time}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1; got {steps}")
    options = None if solver in ADAPTIVE else {"step_size": time / steps}
    return NeuralODE(field, (0.0, time), solver, rtol, atol, gradient, options=options, learn_horizon=horizon)

"""Small vector fields with known solutions, and networks, that the tests of ocnopt.ode share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchdiffeq._impl.odeint import SOLVERS

from ocnopt import OCNOpt
from ocnopt.hosts import Execution
from ocnopt.layers.base import Call
from ocnopt.ode import NeuralODE

TIGHT = {"rtol": 1e-10, "atol": 1e-10}

#: every method of the installed torchdiffeq
METHODS = tuple(SOLVERS)
FIXED = ("euler", "midpoint", "heun2", "heun3", "rk4", "explicit_adams", "implicit_adams", "fixed_adams")


def options_of(method: str, step: float = 0.05) -> dict[str, float] | None:
    return {"step_size": step} if method in FIXED else None


class Decay(nn.Module):
    """dx/dt = −a x."""

    def __init__(self, a: float = 1.3) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a, dtype=torch.float64))

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return -self.a * x

    def exact(self, x: Tensor, T: float) -> Tensor:
        return x * math.exp(-self.a.item() * T)


class Pair(nn.Module):
    """A tuple of states, of different shapes: a rotation, and the time it took."""

    def __init__(self) -> None:
        super().__init__()
        self.omega = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, clock = state
        return self.omega * torch.stack([-x[:, 1], x[:, 0]], 1), torch.ones_like(clock)


class Net(nn.Module):
    """A tanh network that depends on time."""

    def __init__(self, width: int = 3, hidden: int = 4, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two = nn.Linear(width + 1, hidden), nn.Linear(hidden, width)
        self.double()

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        clock = t.expand(len(x), 1)
        out: Tensor = self.two(torch.tanh(self.one(torch.cat([x, clock], 1))))
        return out


def batch(size: int = 5, width: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- models around a block, and what an optimizer asks it ---


def network(block: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), block, nn.Linear(3, 2)).double()


def optimizer(model: nn.Module, **options: Any) -> OCNOpt:
    return OCNOpt(model.parameters(), model=model, **{"curvature": "kronecker", "feedback": "off", **options})


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 0.5).square().mean()


def inner_calls(block: NeuralODE, x: Any, weigh: Callable[[Any], Tensor] | None = None) -> dict[str, list[Call]]:
    """What the block tells of its layers; the gradients of the parameters are left in ``p.grad``."""
    out = block(x)
    parts = out if isinstance(out, tuple) else (out,)
    loss = out.square().sum() if weigh is None else weigh(out)
    h = torch.autograd.grad(loss, parts, retain_graph=True, allow_unused=True)
    block.zero_grad()
    loss.backward()
    named = {n: m for n, m in block.named_modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.GroupNorm)}
    given = {i: g for i, g in enumerate(h) if g is not None}
    with torch.no_grad():
        return block.layer_calls(Execution((x,), {}, dict(enumerate(p.detach() for p in parts)), given), named)

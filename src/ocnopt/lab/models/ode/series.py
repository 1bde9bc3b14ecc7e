"""ODE-RNN (Rubanova et al., 2019): a state that follows an ODE from one observation to the next and jumps at each.

The samples of a batch share a grid of times, and each has observations at some of them. They are solved together from
every time where one of them has an observation to the next such time, and only those that have one there jump.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ocnopt.lab.models.ode.block import ode_block
from ocnopt.lab.models.plain import Shape
from ocnopt.ode import NeuralODE
from ocnopt.ode.layers import TimeSequential


class GatedUnit(nn.Module):
    """A gated recurrent unit (Cho et al., 2014) of three linear layers: ``nn.GRUCell`` hides them from curvature."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.reset, self.update, self.new = (nn.Linear(channels + hidden, hidden) for _ in range(3))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        both = torch.cat([x, h], 1)
        reset, update = torch.sigmoid(self.reset(both)), torch.sigmoid(self.update(both))
        new = torch.tanh(self.new(torch.cat([x, reset * h], 1)))
        return update * h + (1 - update) * new


class ODERNN(nn.Module):
    """``[B, T, D + 1]`` to logits: series on a grid of T times, the last channel 1 where there is an observation."""

    def __init__(self, ode: NeuralODE, cell: GatedUnit, head: nn.Linear, time: float) -> None:
        super().__init__()
        self.ode, self.cell, self.head, self.time = ode, cell, head, time

    def forward(self, x: Tensor) -> Tensor:
        observed = x[..., -1:] > 0
        h = last = x.new_zeros(len(x), self.head.in_features)
        now = 0.0
        for k in observed.any(0).flatten().nonzero().flatten().tolist():
            then = self.time * k / x.shape[1]
            if then > now:
                h = self.ode(h, t=(now, then))
            h = torch.where(observed[:, k], self.cell(x[:, k, :-1], h), h)
            last, now = torch.where(observed[:, k], h, last), then
        out: Tensor = self.head(last)  # what each of them knew after its last observation
        return out


def ode_rnn(
    input_shape: Shape,
    classes: int,
    *,
    hidden: int = 32,
    width: int = 64,
    depth: int = 1,
    time: float = 1.0,
    solver: str = "dopri5",
    tolerance: float = 1e-3,
    gradient: str = "adjoint",
    steps: int = 2,
) -> ODERNN:
    """A field of ``depth`` hidden layers of ``width`` units with tanh, which does not know the time.

    The grid of times is an interval of length ``time``; from one time to the next, a solver that does not choose its
    own steps takes ``steps`` of them.
    """
    if len(input_shape) != 2 or input_shape[1] < 2:
        raise ValueError(f"input_shape must be (times, channels + 1) of a time series; got {input_shape}")
    for name, value in (("hidden", hidden), ("width", width), ("depth", depth)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    layers: list[nn.Module] = [nn.Linear(hidden, width), nn.Tanh()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.Tanh()]
    field = TimeSequential(*layers, nn.Linear(width, hidden))
    ode = ode_block(field, time, solver, tolerance, tolerance, gradient, steps * input_shape[0])
    return ODERNN(ode, GatedUnit(input_shape[1] - 1, hidden), nn.Linear(hidden, classes), time)

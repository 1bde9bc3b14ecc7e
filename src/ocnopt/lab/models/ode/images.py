"""The ODE network of Chen et al. (2018) for images."""

from __future__ import annotations

from typing import Literal

from torch import nn

from ocnopt.lab.models.ode.block import ode_block
from ocnopt.lab.models.plain import Shape, image_size
from ocnopt.ode import Horizon
from ocnopt.ode.layers import ConcatConv2d, TimeSequential

LearnTime = Literal["off", "feedback", "first_order"]


def conv_ode(
    input_shape: Shape,
    classes: int,
    *,
    channels: int = 64,
    halvings: int = 2,
    solver: str = "dopri5",
    tolerance: float = 1e-3,
    gradient: str = "adjoint",
    steps: int = 10,
    time: float = 1.0,
    learn_time: LearnTime = "off",
    time_penalty: float = 0.1,
    time_lr: float = 0.1,
    time_every: int = 1,
) -> nn.Sequential:
    """Convolutions that halve the image, twice, an ODE of two convolutions that know the time, a linear layer.

    ``time`` is T, where the ODE ends; ``learn_time`` moves it in the course of the training, at the price of
    ``time_penalty`` (c) and with a step size of ``time_lr``, every ``time_every`` steps. ``steps`` are those of a
    solver that does not choose its own.
    """
    if halvings < 0:
        raise ValueError(f"halvings must not be negative; got {halvings}")
    # of less than 2 × 2 pixels the normalisations would leave nothing
    n_in, *_ = image_size(input_shape, at_least=2 + 2 * 2**halvings)
    if channels < 1:
        raise ValueError(f"channels must be at least 1; got {channels}")
    horizon = None
    if learn_time != "off":
        horizon = Horizon(time_penalty, time_lr, time_every, method=learn_time)

    def norm() -> nn.Module:
        groups = next(g for g in range(min(32, channels), 0, -1) if channels % g == 0)
        return nn.GroupNorm(groups, channels)

    field = TimeSequential(
        norm(), nn.ReLU(), ConcatConv2d(channels, channels, padding=1),
        norm(), nn.ReLU(), ConcatConv2d(channels, channels, padding=1), norm(),
    )  # fmt: skip
    shrinking: list[nn.Module] = [nn.Conv2d(n_in, channels, 3)]
    for _ in range(halvings):
        shrinking += [norm(), nn.ReLU(), nn.Conv2d(channels, channels, 4, 2, 1)]
    return nn.Sequential(
        *shrinking,
        ode_block(field, time, solver, tolerance, tolerance, gradient, steps, horizon),
        norm(), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes),
    )  # fmt: skip

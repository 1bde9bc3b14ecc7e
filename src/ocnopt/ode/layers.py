"""Layers that know the time, for vector fields: those of Chen et al. (2018) and of FFJORD (Grathwohl et al., 2019).

Each is made of ``nn.Linear`` or ``nn.Conv2d``, so that every part has Kronecker curvature; a field of your own that is
made of such layers has it as well.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn


class TimeLayer(nn.Module, ABC):
    """A layer that is called as ``layer(t, x)``, with samples in dimension 0 of ``x``."""

    @abstractmethod
    def forward(self, t: Tensor, x: Tensor) -> Tensor: ...


class TimeSequential(nn.Sequential):
    """Layers one after another, called as ``field(t, x)``. The time goes to those that know it."""

    def forward(self, t: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self:
            x = layer(t, x) if isinstance(layer, TimeLayer | TimeSequential) else layer(x)
        return x


class Concat(TimeLayer):
    """The time is one more input feature or channel, the first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        time = t.to(x.dtype).expand(len(x), 1, *x.shape[2:])
        out: Tensor = self.layer(torch.cat([time, x], 1))
        return out


class ConcatLinear(Concat):
    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(nn.Linear(in_features + 1, out_features, bias))


class ConcatConv2d(Concat):
    """Takes the arguments of ``nn.Conv2d``, without counting the channel of the time."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3, **options: Any) -> None:
        super().__init__(nn.Conv2d(in_channels + 1, out_channels, kernel_size, **options))


class Hyper(TimeLayer):
    """Something done to the output of a layer by features or channels that are made from the time."""

    def __init__(self, layer: nn.Module, features: int) -> None:
        super().__init__()
        self.layer, self.features = layer, features

    def of_time(self, made: nn.Module, t: Tensor, x: Tensor) -> Tensor:
        """``made(t)`` for each sample, ``[B, features, 1, …]``: one row a sample, so that these are layers like any."""
        out: Tensor = made(t.to(x.dtype).expand(len(x), 1))
        return out.view(*out.shape, *[1] * (x.dim() - 2))


class ConcatSquash(Hyper):
    """``layer(x) · sigmoid(W t + c) + V t``."""

    def __init__(self, layer: nn.Module, features: int) -> None:
        super().__init__(layer, features)
        self.gate, self.shift = nn.Linear(1, features), nn.Linear(1, features, bias=False)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.of_time(self.gate, t, x))
        out: Tensor = self.layer(x) * gate + self.of_time(self.shift, t, x)
        return out


class ConcatSquashLinear(ConcatSquash):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(nn.Linear(in_features, out_features), out_features)


class ConcatSquashConv2d(ConcatSquash):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3, **options: Any) -> None:
        super().__init__(nn.Conv2d(in_channels, out_channels, kernel_size, **options), out_channels)


class Squash(Hyper):
    """``layer(x) · sigmoid(W t + c)``."""

    def __init__(self, layer: nn.Module, features: int) -> None:
        super().__init__(layer, features)
        self.gate = nn.Linear(1, features)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * torch.sigmoid(self.of_time(self.gate, t, x))
        return out


class SquashLinear(Squash):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(nn.Linear(in_features, out_features), out_features)


class Shift(Hyper):
    """``layer(x) + V t``: the same function as :class:`Concat` for a linear layer, with a smaller input factor."""

    def __init__(self, layer: nn.Module, features: int) -> None:
        super().__init__(layer, features)
        self.shift = nn.Linear(1, features, bias=False)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.of_time(self.shift, t, x)
        return out


class ShiftLinear(Shift):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(nn.Linear(in_features, out_features), out_features)

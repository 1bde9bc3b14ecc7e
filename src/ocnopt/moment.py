"""When a step takes place, and what follows from that alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Moment:
    """Of one step, for all layers of a bucket: each number is computed once, however many of them ask."""

    clock: Tensor  # steps taken, this one not counted
    dtype: torch.dtype
    _weights: dict[float, Tensor] = field(default_factory=dict)
    _steps: Tensor | None = None

    @property
    def steps(self) -> Tensor:
        """Steps taken, this one counted; at least 1, so that bias corrections of a bad first step stay finite."""
        if self._steps is None:
            self._steps = (self.clock + 1).to(self.dtype)
        return self._steps

    def weight_of_average(self, mu: float) -> Tensor | float:
        """1 − μ^t, what an average that started at zero lacks; without loss of digits where μ is close to 1."""
        if not mu:
            return 1.0
        if mu not in self._weights:
            self._weights[mu] = -torch.expm1(self.steps * math.log(mu))
        return self._weights[mu]

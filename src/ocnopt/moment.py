"""When a step takes place, and what follows from that alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ocnopt import whole_step


@dataclass
class Moment:
    """Of one step, for all layers of a bucket: each number is computed once, however many of them ask."""

    clock: Tensor  # steps taken, this one not counted
    dtype: torch.dtype
    rates: Sequence[float] = ()  # of the averages that are likely to be asked for
    _weights: dict[float, Tensor] = field(default_factory=dict)

    def weight_of_average(self, mu: float) -> Tensor | float:
        """1 − μ^t, what an average that started at zero lacks; without loss of digits where μ is close to 1.

        This step is counted, so that bias corrections of a bad first step stay finite.
        """
        if not mu:
            return 1.0
        if mu not in self._weights:
            rates = tuple(dict.fromkeys((mu, *filter(None, self.rates))))
            logs = _logarithms(rates, self.dtype, self.clock.device)
            weights = -torch.expm1(torch.addcmul(logs, logs, self.clock.to(self.dtype)))
            self._weights |= zip(rates, weights.unbind(), strict=True)
        return self._weights[mu]


@whole_step.remembered
def _logarithms(rates: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # one by one: a list would have to be copied to the device
    return torch.stack([torch.full((), math.log(mu), dtype=dtype, device=device) for mu in rates])

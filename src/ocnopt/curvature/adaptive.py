"""C = diag(√E[q⊙q] + ε), eq. (adap): with the feedback off this is RMSprop; with momentum as an average, Adam.

q is the gradient of the Bellman objective, Q_θ: gradient plus weight decay, never momentum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ocnopt.curvature.base import Curvature, Metric
from ocnopt.multi import ema_

if TYPE_CHECKING:
    from ocnopt.bucket import Bucket


@dataclass
class DiagonalMetric(Metric):
    diagonals: list[Tensor]

    def solve(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        return list(torch._foreach_div(list(vectors), self.diagonals))

    def select(self, parameters: Sequence[int]) -> DiagonalMetric:
        return DiagonalMetric([self.diagonals[i] for i in parameters])


class Adaptive(Curvature):
    name = "adaptive"

    def measure(self, bucket: Bucket, a: Tensor | None) -> DiagonalMetric:
        decay, eps = bucket.group["decay"], bucket.group["eps"]
        q = bucket.force(a)
        second_moment = bucket.zeros_like_parameters("second_moment")
        ema_(second_moment, list(torch._foreach_mul(q, q)), (1 - decay) * bucket.ok)
        diagonals = torch._foreach_sqrt(second_moment)
        if bucket.group["bias_correction"]:
            torch._foreach_div_(diagonals, bucket.weight_of_average(decay) ** 0.5)
        torch._foreach_add_(diagonals, eps)
        return DiagonalMetric(list(diagonals))

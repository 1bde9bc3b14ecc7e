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

if TYPE_CHECKING:
    from ocnopt.bucket import Bucket


@dataclass
class DiagonalMetric(Metric):
    diagonals: list[Tensor]
    is_new = True

    def solve(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        return list(torch._foreach_div(list(vectors), self.diagonals))


class Adaptive(Curvature):
    name = "adaptive"

    def measure(self, bucket: Bucket, a: Tensor | None) -> DiagonalMetric:
        decay, eps, corrected = (bucket.group[name] for name in ("decay", "eps", "bias_correction"))
        fresh = ["second_moment" not in state for state in bucket.states]
        q, second_moment = bucket.force(a), bucket.zeros_like_parameters("second_moment")
        torch._foreach_mul_(second_moment, torch.rsub(bucket.ok, 1, alpha=1 - decay))
        torch._foreach_addcmul_(second_moment, q, q, value=1 - decay)
        weight = bucket.moment.weight_of_average(decay) if corrected else 1.0
        if corrected and any(fresh):  # a statistic that starts late, after a change of curvature, is right at once
            torch._foreach_mul_([v for v, new in zip(second_moment, fresh, strict=True) if new], weight / (1 - decay))
        diagonals = list(torch._foreach_div(second_moment, weight))
        if not eps:  # 0/0 is no step
            torch._foreach_clamp_min_(diagonals, torch.finfo(bucket.ok.dtype).tiny)
        torch._foreach_sqrt_(diagonals)
        if eps:
            torch._foreach_add_(diagonals, eps)
        return DiagonalMetric(diagonals)

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
        corrected = bucket.group["bias_correction"]
        # a statistic that starts late, after a change of curvature, is right at once
        first = bucket.moment.weight_of_average(decay) if corrected else 1 - decay
        fresh = ["second_moment" not in state for state in bucket.states]
        second_moment, squares = bucket.zeros_like_parameters("second_moment"), list(torch._foreach_mul(q, q))
        for new, weight in ((True, first), (False, 1 - decay)):
            if new in fresh:
                ema_(_where(second_moment, fresh, new), _where(squares, fresh, new), weight * bucket.ok)
        diagonals = torch._foreach_sqrt(second_moment)
        if corrected:
            torch._foreach_div_(diagonals, bucket.moment.weight_of_average(decay) ** 0.5)
        if eps:
            torch._foreach_add_(diagonals, eps)
        else:  # 0/0 is no step
            torch._foreach_clamp_min_(diagonals, torch.finfo(bucket.ok.dtype).tiny)
        return DiagonalMetric(list(diagonals))


def _where(tensors: Sequence[Tensor], flags: Sequence[bool], wanted: bool) -> list[Tensor]:
    return [t for t, flag in zip(tensors, flags, strict=True) if flag == wanted]

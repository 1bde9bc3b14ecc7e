"""C = diag(√E[q⊙q] + ε), eq. (adap): with the feedback off this is RMSprop; with momentum as an average, Adam.

q is the gradient of the Bellman objective, Q_θ: gradient plus weight decay, never momentum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ocnopt.curvature.base import Curvature, Diagonals, Metric
from ocnopt.multi import at_once

if TYPE_CHECKING:
    from ocnopt.bucket import Bucket


@dataclass
class Roots(Diagonals):
    """√(v/weight) + ε."""

    sources: list[Tensor]  # v
    weight: Tensor | float | None  # of the average that v is
    eps: float

    def of(self, source: Tensor) -> Tensor:
        # a CPU takes four times as long for the root of zero, of weights that have never had a gradient
        mean = source.clamp_min(self._least) if self.weight is None else (source / self.weight).clamp_min_(self._least)
        return mean.sqrt_().add_(self.eps)

    def select(self, index: Sequence[int]) -> Roots:
        return Roots([self.sources[i] for i in index], self.weight, self.eps)

    @cached_property
    def together(self) -> list[Tensor]:
        means = self.sources if self.weight is None else torch._foreach_div(self.sources, self.weight)
        roots = list(torch._foreach_clamp_min(list(means), self._least))
        torch._foreach_sqrt_(roots)
        if self.eps:
            torch._foreach_add_(roots, self.eps)
        return roots

    @property
    def _least(self) -> float:
        """0/0 is no step."""
        return torch.finfo(self.sources[0].dtype).tiny


@dataclass
class DiagonalMetric(Metric):
    diagonals: Diagonals
    is_new = True

    def solve(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        return list(torch._foreach_div(list(vectors), self.diagonals.together))


class Adaptive(Curvature):
    name = "adaptive"

    def measure(self, bucket: Bucket, a: Tensor | None) -> DiagonalMetric:
        decay, eps, corrected = (bucket.group[name] for name in ("decay", "eps", "bias_correction"))
        fresh = ["second_moment" not in state for state in bucket.states]
        q, second_moment = bucket.force(a), bucket.zeros_like_parameters("second_moment")
        kept = torch.rsub(bucket.ok, 1, alpha=1 - decay)
        for moments, gradients in at_once(second_moment, q):
            torch._foreach_mul_(moments, kept)
            torch._foreach_addcmul_(moments, gradients, gradients, value=1 - decay)
        weight = bucket.moment.weight_of_average(decay) if corrected else None
        if weight is not None and any(fresh):  # what starts late, after a change of curvature, is right at once
            torch._foreach_mul_([v for v, new in zip(second_moment, fresh, strict=True) if new], weight / (1 - decay))
        return DiagonalMetric(Roots(second_moment, weight, eps))

"""C = I: with the feedback off this is SGD."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ocnopt.curvature.base import Curvature, Metric

if TYPE_CHECKING:
    from ocnopt.bucket import Bucket


class IdentityMetric(Metric):
    is_identity = True

    def solve(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        return list(vectors)


class Identity(Curvature):
    name = "identity"

    def measure(self, bucket: Bucket, a: Tensor | None) -> IdentityMetric:
        return IdentityMetric()

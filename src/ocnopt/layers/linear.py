"""Linear layers, with any number of dimensions between the samples and the features."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from ocnopt.layers import outer
from ocnopt.layers.affine import Affine
from ocnopt.layers.base import Call, KroneckerInputs
from ocnopt.layers.registry import register


@register(nn.Linear)
class LinearAdapter(Affine):
    """``y = W x + b``; one block, every dimension between the first and the last is shared."""

    def factors(self, call: Call) -> KroneckerInputs:
        x, h = outer.operands(call)
        shared = math.prod(h.shape[1:-1])
        return KroneckerInputs(*(v.reshape(call.batch, 1, shared, v.shape[-1]) for v in (x, h)))

    def sizes(self, call: Call) -> tuple[int, int, int]:
        return math.prod(call.h.shape[1:-1]), call.x.shape[-1], call.h.shape[-1]

    def apply(self, call: Call, weight: Tensor) -> Tensor:
        x, _ = outer.operands(call)
        return F.linear(x, weight)

    def blocks(self, module: nn.Module, weight: Tensor) -> Tensor:
        return weight.unsqueeze(-3)

    def unblock(self, module: nn.Module, matrix: Tensor) -> Tensor:
        return matrix.squeeze(-3)

    def product(self, module: nn.Module) -> Callable[..., Tensor] | None:
        return F.linear

    def pull_back(self, call: Call, weight: Tensor) -> Tensor:
        return call.h @ weight

    def call_refusal(self, call: Call) -> str | None:
        if call.x.dim() < 2:
            return "its input has no dimension of samples: Linear was given a single vector"
        return super().call_refusal(call)

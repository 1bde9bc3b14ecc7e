"""The loss after a step, on the batch that the step was made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ocnopt.rng import RNGState

if TYPE_CHECKING:
    from ocnopt.optimizer import OCNOpt


class Remeasure:
    """Calls the closure of a step once more, leaving gradients, buffers and random numbers as they are."""

    def __init__(self, optimizer: OCNOpt, closure: Callable[[], float], before: Tensor, rng: RNGState) -> None:
        self.optimizer, self.closure, self.before, self.rng = optimizer, closure, before, rng
        self.step = optimizer._count

    def __call__(self) -> float:
        if self.optimizer._count != self.step:
            raise RuntimeError("actual_change must be read before the next step: the parameters have moved on")
        model = self.optimizer._model
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = [None if p.grad is None else p.grad.clone() for p in params]
        buffers = [(b, b.clone()) for b in model.buffers()] if model is not None else []
        try:
            with torch.enable_grad(), self.rng.restored():
                after = self.closure()
        finally:
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            with torch.no_grad():
                for b, value in buffers:
                    b.copy_(value)
            if self.optimizer._tape is not None:
                self.optimizer._tape.clear()
        return float(after) - float(self.before)

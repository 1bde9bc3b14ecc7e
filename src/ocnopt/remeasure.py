"""The loss after a step, on the batch that the step was made from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ocnopt.environment import Buffers
from ocnopt.rng import AllRNG

if TYPE_CHECKING:
    from ocnopt.optimizer import OCNOpt


class Remeasure:
    """Calls the closure of a step once more, leaving gradients, buffers and random numbers as they are."""

    def __init__(self, optimizer: OCNOpt, closure: Callable[[], float], before: Tensor, rng: AllRNG) -> None:
        self.optimizer, self.closure, self.before, self.rng = optimizer, closure, before, rng
        self.step = optimizer._count

    def __call__(self) -> float:
        if self.optimizer._count != self.step:
            raise RuntimeError("actual_change must be read before the next step: the parameters have moved on")
        model = self.optimizer._model
        params = {p: p.grad for group in self.optimizer.param_groups for p in group["params"]}
        if model is not None:
            params |= {p: p.grad for p in model.parameters()}
        buffers = None if model is None else Buffers(model)
        try:
            for p, grad in params.items():  # the closure gets copies: it may zero them in place
                p.grad = None if grad is None else grad.clone()
            with torch.enable_grad(), self.rng.restored():
                after: Any = self.closure()
        finally:
            for p, grad in params.items():
                p.grad = grad
            if buffers is not None:
                buffers.restore()
            if self.optimizer._tape is not None:
                self.optimizer._tape.clear()
        return (after.item() if isinstance(after, Tensor) else after) - self.before.item()

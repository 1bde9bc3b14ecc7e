"""By what factor gradients were multiplied between the backward pass and the step.

A ``GradScaler`` multiplies the loss and divides ``p.grad``; clipping by norm makes ``p.grad`` shorter. The adjoints of
the tape must follow, or they would speak of another loss than the gradients do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

_PARAMETERS, _ENTRIES = 16, 256


class _Kept(NamedTuple):
    grad: Tensor
    version: int
    sample: Tensor  # some of its entries, as the backward pass left them


class Scaling:
    """Remembers a few entries of a few gradients; the smallest tensors will do."""

    def __init__(self, model: nn.Module, wanted: Callable[[], bool]) -> None:
        trained = sorted((p for p in model.parameters() if p.requires_grad), key=Tensor.numel)
        self._wanted = wanted
        self._kept: dict[Tensor, _Kept] = {}
        self.handles = [p.register_post_accumulate_grad_hook(self._keep) for p in trained[:_PARAMETERS]]

    def _keep(self, p: Tensor) -> None:
        if p.grad is not None and self._wanted():
            sample = p.grad.detach().flatten()[:_ENTRIES].clone()
            self._kept[p] = _Kept(p.grad, p.grad._version, sample)

    def clear(self) -> None:
        self._kept.clear()

    @torch.no_grad()
    def factor(self, scaler: bool) -> Tensor | None:
        """``None`` if nobody has touched the gradients, as far as their versions tell: a ``scaler`` leaves no mark.

        If they were not just multiplied (clipped by value, a penalty added), adjoints cannot follow that: they follow
        the scaler alone, whose factors are powers of two.
        """
        kept = [(p.grad, k) for p, k in self._kept.items() if p.grad is not None]
        if not kept or (not scaler and all(grad is k.grad and grad._version == k.version for grad, k in kept)):
            return None
        device = kept[0][0].device
        now = torch.cat([grad.flatten()[:_ENTRIES].to(device, torch.float64) for grad, _ in kept])
        then = torch.cat([k.sample.to(device, torch.float64) for _, k in kept])
        size = then @ then
        ratio = torch.where(size > 0, (now @ then) / size, 1.0)
        uniform = torch.linalg.vector_norm(now - ratio * then) <= 1e-3 * torch.linalg.vector_norm(now)
        power = torch.exp2(torch.log2(ratio.clamp_min(1e-300)).round()) if scaler else torch.ones_like(ratio)
        return torch.where(uniform, ratio, power).nan_to_num(1.0, 1.0, 1.0)


def unscale_(params: Iterable[Tensor], scale: Tensor) -> None:
    """Divide the gradients, as ``GradScaler.unscale_`` does, without waiting for the device."""
    by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
    for p in params:
        if p.grad is not None:
            by_device[p.grad.device].append(p.grad)
    inverse = scale.double().reciprocal()
    for device, grads in by_device.items():
        torch._foreach_mul_(grads, inverse.to(device))

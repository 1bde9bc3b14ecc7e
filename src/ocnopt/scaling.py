"""By what factor gradients were multiplied between the backward pass and the step.

A ``GradScaler`` multiplies the loss and divides ``p.grad``; clipping by norm makes ``p.grad`` shorter. The adjoints of
the tape must follow, or they would speak of another loss than the gradients do. Where several processes share a batch,
``p.grad`` becomes the mean of what their backward passes left, and the loss is the mean of theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ocnopt.distributed import World

_PARAMETERS, _ENTRIES = 16, 256


class _Kept(NamedTuple):
    grad: Tensor
    version: int
    sample: Tensor  # some of its entries, as the backward pass left them


class Scaling:
    """Remembers a few entries of a few gradients; the smallest tensors will do."""

    def __init__(self, model: nn.Module, wanted: Callable[[], bool]) -> None:
        trained = sorted((p for p in model.parameters() if p.requires_grad), key=Tensor.numel)
        self._watched = trained[:_PARAMETERS]
        self._wanted = wanted
        self._kept: dict[Tensor, _Kept] = {}
        self.handles = [p.register_post_accumulate_grad_hook(self._keep) for p in self._watched]

    def _keep(self, p: Tensor) -> None:
        if p.grad is not None and self._wanted():
            self._kept[p] = _Kept(p.grad, p.grad._version, _sample(p.grad).clone())

    def clear(self) -> None:
        self._kept.clear()

    @torch.no_grad()
    def factor(self, scaler: bool, world: World) -> Tensor | None:
        """``None`` if nobody has touched the gradients, as far as their versions tell: a ``scaler`` leaves no mark.

        If they were not just multiplied (clipped by value, a penalty added), adjoints cannot follow that: they follow
        the scaler alone, whose factors are powers of two.
        """
        if world.size == 1 and not scaler and self._untouched():
            return None
        return _ratio(*self._then_and_now(world), scaler) / world.size if self._watched else None

    def _untouched(self) -> bool:
        return all(p.grad is None or (p.grad is k.grad and p.grad._version == k.version) for p, k in self._kept.items())

    def _then_and_now(self, world: World) -> tuple[Tensor, Tensor]:
        """The entries as the backward passes of all processes left them, on average, and as they are.

        A process that did not use a parameter has no share in its gradient.
        """
        columns = []  # equally many everywhere
        for p in self._watched:
            column = torch.zeros(3, min(p.numel(), _ENTRIES), dtype=torch.float64, device=p.device)
            if p.grad is not None:
                column[0] = _sample(p.grad)
                if p in self._kept:
                    column[1], column[2] = self._kept[p].sample, 1.0
            columns.append(column.to(self._watched[0].device))
        now, *sums = torch.cat(columns, 1)
        world.sum_(sums)
        then, there = sums
        return then / world.size, torch.where(there > 0, now, 0)


def _sample(grad: Tensor) -> Tensor:
    return grad.detach().flatten()[:_ENTRIES]


def _ratio(then: Tensor, now: Tensor, scaler: bool) -> Tensor:
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

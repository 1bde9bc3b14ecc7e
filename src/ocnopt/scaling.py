"""By what factor gradients were multiplied between the backward pass and the step.

A ``GradScaler`` multiplies the loss and divides ``p.grad``; clipping by norm makes ``p.grad`` shorter. The adjoints of
the tape must follow, or they would speak of another loss than the gradients do. Where several processes share a batch,
``p.grad`` becomes the mean of what their backward passes left, and the loss is the mean of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from ocnopt import whole_step
from ocnopt.distributed import World

_PARAMETERS, _ENTRIES = 16, 256
#: nobody clips to less than 2^-5 of a gradient, and no scaler multiplies by less than 2^5, in binary digits
_CLIPPED = 5


class Scaling:
    """Remembers a few entries of a few gradients, of those that come first."""

    def __init__(self, model: nn.Module, wanted: Callable[[], bool]) -> None:
        trained = sorted((p for p in model.parameters() if p.requires_grad), key=Tensor.numel)
        self._watched = trained[:_PARAMETERS]  # of all processes together: the smallest
        self._wanted = wanted
        self._shared = set(self._watched)
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._kept: dict[Tensor, Tensor] = {}  # some entries of a gradient, as the backward pass left them
        self._left: dict[Tensor, tuple[Tensor, int]] = {}  # the gradient itself, and how often it was written to
        self._pairs: list[tuple[Tensor, Tensor]] | None = None
        self._waiting: dict[Tensor, None] = {}  # those that are to be looked at when the backward pass is over
        self._task, self._alone = -1, False  # which one; and is this process alone with its gradients?
        self.watch(model.parameters())

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Also what has been thawed since."""
        for p in parameters:
            if p.requires_grad and p.is_leaf and p not in self._hooks:
                self._hooks[p] = p.register_post_accumulate_grad_hook(self._keep)

    def remove(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.clear()

    def _keep(self, p: Tensor) -> None:
        known, others = p in self._kept or p in self._waiting, len(self._kept) + len(self._waiting)
        if not known and others >= _PARAMETERS and not (p in self._shared and _several_processes()):
            return
        if not self._wanted() or p.grad is None or _untouched(p):
            return
        if self._is_left_alone(p):
            self._waiting[p] = None
        else:
            self._take([p])

    def _is_left_alone(self, p: Tensor) -> bool:
        """Does nobody write to the gradient before the backward pass is over? Then it is looked at with others."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._alone = task, task != -1 and not _several_processes()
            if self._alone:
                Variable._execution_engine.queue_callback(self._settle)
        return self._alone and _hooks_on(p) == 1  # none but ours

    @torch.no_grad()
    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._take([p for p in waiting if p.grad is not None])

    def _take(self, parameters: list[Tensor]) -> None:
        """Copies of what is there, few operations for many."""
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for p in parameters:
            assert p.grad is not None
            self._left[p] = p.grad, p.grad._version
            alike.setdefault((p.grad.device, p.grad.dtype), []).append((p, _sample(p.grad)))
        for theirs in alike.values():
            samples = [sample for _, sample in theirs]
            parts = torch.cat(samples).split([len(sample) for sample in samples])
            self._kept |= {p: part for (p, _), part in zip(theirs, parts, strict=True)}

    def clear(self) -> None:
        self._kept.clear()
        self._left.clear()
        self._waiting.clear()
        self._pairs = None

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Entries as the backward pass left them, and as they are when they are first asked for."""
        if self._pairs is None:
            self._settle()
            self._pairs = [(then, _sample(p.grad)) for p, then in self._kept.items() if p.grad is not None]
        return self._pairs

    @pairs.setter
    def pairs(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._pairs = pairs

    @torch.no_grad()
    def gone(self) -> bool:
        """Were there gradients that somebody has set to ``None`` or to zero? Only touched ones are looked at."""
        self._settle()  # what a backward pass left that was interrupted
        if any(p.grad is grad and grad._version == version for p, (grad, version) in self._left.items()):
            return False
        there = any(bool(then.any()) for then in self._kept.values())
        return there and not any(bool(_sample(p.grad).any()) for p in self._kept if p.grad is not None)

    @torch.no_grad()
    def factor(self, world: World) -> Tensor | None:
        """Found by comparing values: a scaler does not change the versions of what it divides.

        If gradients were not just multiplied (clipped by value, a penalty added), adjoints cannot follow that: they
        follow the scaler alone, if there was one, and the sum over the groups takes care of the rest.
        """
        self._settle()
        if world.size > 1:
            return _ratio(*self._everywhere(world)) / world.size if self._watched else None
        kept = self.pairs
        if not kept:
            return None
        device = kept[0][0].device
        then, now = (torch.cat([t.to(device) for t in column]).to(torch.float64) for column in zip(*kept, strict=True))
        # a factor of 1 need not be multiplied by
        return None if whole_step.may_look(then) and torch.equal(then, now) else _ratio(then, now)

    def _everywhere(self, world: World) -> tuple[Tensor, Tensor]:
        """The entries as the backward passes of all processes left them, on average, and as they are.

        A process that did not use a parameter has no share in its gradient.
        """
        columns = []  # equally many everywhere
        for p in self._watched:
            column = torch.zeros(3, min(p.numel(), _ENTRIES), dtype=torch.float64, device=p.device)
            if p.grad is not None:
                column[0] = _sample(p.grad)
                if p in self._kept:
                    column[1], column[2] = self._kept[p], 1.0
            columns.append(column.to(self._watched[0].device))
        now, *sums = torch.cat(columns, 1)
        world.sum_(sums)
        then, there = sums
        return then / world.size, torch.where(there > 0, now, 0)


def _untouched(p: Tensor) -> bool:
    """Is it certain that the step finds the gradient as the backward pass leaves it?"""
    return whole_step.undisturbed() and _hooks_on(p) == 1  # none but ours


def _hooks_on(p: Tensor) -> int:
    return len(p._post_accumulate_grad_hooks or ())


def _several_processes() -> bool:
    """Their gradients may be on the way to each other before the backward pass is over."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _sample(grad: Tensor) -> Tensor:
    grad = grad.detach()
    entries = grad if grad.dim() == 1 else grad.reshape(-1)
    return entries if len(entries) <= _ENTRIES else entries[:_ENTRIES]


def _ratio(then: Tensor, now: Tensor) -> Tensor:
    """What the entries were multiplied by: all of them, or, by a scaler, many of them or the whole."""
    ratios = now / then
    middle = _middle(ratios)
    alike = (ratios - middle).abs() <= 1e-2 * middle.abs()  # not NaN
    known = ratios.isfinite().sum()
    products, squares = (torch.where(alike, then * each, 0).sum() for each in (now, then))
    ratio = products / squares
    many = (4 * alike.sum() >= known) & (alike.sum() >= known.clamp_max(3)) & _is_far(ratio)
    rough = torch.where(ratios.isfinite(), now * then, 0).sum() / torch.where(ratios.isfinite(), then * then, 0).sum()
    rough = torch.where(_is_far(rough), torch.exp2(torch.log2(rough).round()), 1.0)  # scalers have powers of two
    return torch.where(many | (alike.sum() == known), ratio, rough).nan_to_num(1.0, 1.0, 1.0)


def _is_far(ratio: Tensor) -> Tensor:
    return torch.log2(ratio).abs() > _CLIPPED


def _middle(values: Tensor) -> Tensor:
    """The median of what is finite, without waiting for the device as ``nanmedian`` may."""
    ordered = torch.where(values.isfinite(), values, torch.inf).sort().values
    place = ((values.isfinite().sum() - 1) // 2).clamp_min(0)
    return ordered.index_select(0, place.reshape(1)).squeeze()

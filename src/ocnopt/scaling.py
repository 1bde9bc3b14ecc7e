"""By what factor gradients were multiplied between the backward pass and the step.

A ``GradScaler`` multiplies the loss and divides ``p.grad``; clipping by norm makes ``p.grad`` shorter. The adjoints of
the tape must follow, or they would speak of another loss than the gradients do. Where several processes share a batch,
``p.grad`` becomes the mean of what their backward passes left, and the loss is the mean of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from ocnopt import whole_step
from ocnopt.distributed import World

_PARAMETERS, _ENTRIES = 16, 256
#: nobody clips to less than 2^-5 of a gradient, and no scaler multiplies by less than 2^5, in binary digits
_CLIPPED = 5


class Taken:
    """A few entries of some gradients on one device, one after the other, as a backward pass left them."""

    def __init__(self, parameters: list[Tensor], entries: Tensor | None = None) -> None:
        self.parameters, grads = parameters, _grads(parameters)
        #: the gradients themselves, and how often each was written to
        self.left = [(grad, grad._version) for grad in grads]
        self.entries = _entries(grads) if entries is None else entries

    @property
    def is_left(self) -> bool:
        """Has nobody touched one of the gradients since?"""
        both = zip(self.parameters, self.left, strict=True)
        return any(p.grad is grad and grad._version == version for p, (grad, version) in both)

    def by_parameter(self) -> dict[Tensor, Tensor]:
        sizes = [min(p.numel(), _ENTRIES) for p in self.parameters]
        return dict(zip(self.parameters, self.entries.split(sizes), strict=True))

    def but_for(self, gone: Container[Tensor]) -> list[Taken]:
        """Without some of the parameters, or none at all."""
        if not any(p in gone for p in self.parameters):
            return [self]
        rest = {p: part for p, part in self.by_parameter().items() if p not in gone}
        if not rest:
            return []
        taken = Taken(list(rest), torch.cat(list(rest.values())))
        taken.left = [left for p, left in zip(self.parameters, self.left, strict=True) if p in rest]
        return [taken]


class Scaling:
    """Remembers a few entries of a few gradients, of those that come first."""

    def __init__(self, model: nn.Module, wanted: Callable[[], bool]) -> None:
        """``wanted``: is it of interest what becomes of the gradients of the backward pass under way?"""
        trained = sorted((p for p in model.parameters() if p.requires_grad), key=Tensor.numel)
        self._watched = trained[:_PARAMETERS]  # of all processes together: the smallest
        self._wanted = wanted
        self._shared = set(self._watched)
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._known: set[int] = set()  # ids of the parameters whose gradients are looked at in this step
        self._enough = False  # are there so many of them that no others are looked at?
        self._taken: list[Taken] = []
        self._pairs: list[tuple[Tensor, Tensor]] | None = None
        self._waiting: dict[int, Tensor] = {}  # by id: those that are to be looked at when the backward pass is over
        self._task = -1  # which one
        self._wants = self._together = False  # in it: are gradients looked at? Do several processes share them?
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
        task = torch._C._current_graph_task_id()
        if task != self._task or task == -1:
            self._begin(task)
        if not self._wants or (self._enough and id(p) not in self._known and not self._is_shared(p)):
            return
        ours_alone = len(p._post_accumulate_grad_hooks or ()) == 1
        if p.grad is None or (ours_alone and whole_step.undisturbed()):  # the step finds it as it is
            return
        self._known.add(id(p))
        self._enough = len(self._known) >= _PARAMETERS
        if ours_alone and task != -1 and not self._together:  # nobody writes to it before the backward pass is over
            self._waiting[id(p)] = p
        else:
            self._take([p])

    def _begin(self, task: int) -> None:
        """A backward pass has come to its first gradient."""
        self._task, self._wants, self._together = task, self._wanted(), _several_processes()
        if self._wants and task != -1:
            Variable._execution_engine.queue_callback(self._settle)

    def _is_shared(self, p: Tensor) -> bool:
        return self._together and p in self._shared

    def _settle(self) -> None:
        waiting, self._waiting = self._waiting, {}
        if waiting:
            self._take([p for p in waiting.values() if p.grad is not None])

    @torch.no_grad()
    def _take(self, parameters: list[Tensor]) -> None:
        """Copies of what is there, one operation for many; they take the place of earlier ones."""
        if self._taken:
            self._taken = [left for taken in self._taken for left in taken.but_for(set(parameters))]
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for p, grad in zip(parameters, _grads(parameters), strict=True):
            alike.setdefault((grad.device, grad.dtype), []).append(p)
        self._taken += map(Taken, alike.values())

    def clear(self) -> None:
        self._known.clear()
        self._enough = False
        self._taken.clear()
        self._waiting.clear()
        self._pairs = None

    @property
    def kept(self) -> dict[Tensor, Tensor]:
        """Entries as the backward pass left them."""
        return {p: part for taken in self._taken for p, part in taken.by_parameter().items()}

    @property
    @torch.no_grad()
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Entries as the backward pass left them, and as they are when they are first asked for."""
        if self._pairs is None:
            self._settle()
            gone = {p for taken in self._taken for p in taken.parameters if p.grad is None}
            left = [there for taken in self._taken for there in taken.but_for(gone)]
            self._pairs = [(taken.entries, _entries(_grads(taken.parameters))) for taken in left]
        return self._pairs

    @pairs.setter
    def pairs(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self._pairs = pairs

    @torch.no_grad()
    def gone(self) -> bool:
        """Were there gradients that somebody has set to ``None`` or to zero? Only touched ones are looked at."""
        self._settle()  # what a backward pass left that was interrupted
        if not self._taken or any(taken.is_left for taken in self._taken):
            return False
        there = any(bool(taken.entries.any()) for taken in self._taken)
        grads = (p.grad for taken in self._taken for p in taken.parameters)
        return there and not any(bool(_sample(grad).any()) for grad in grads if grad is not None)

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
        columns, kept = [], self.kept  # equally many everywhere
        for p in self._watched:
            column = torch.zeros(3, min(p.numel(), _ENTRIES), dtype=torch.float64, device=p.device)
            if p.grad is not None:
                column[0] = _sample(p.grad)
                if p in kept:
                    column[1], column[2] = kept[p], 1.0
            columns.append(column.to(self._watched[0].device))
        now, *sums = torch.cat(columns, 1)
        world.sum_(sums)
        then, there = sums
        return then / world.size, torch.where(there > 0, now, 0)


def _several_processes() -> bool:
    """Their gradients may be on the way to each other before the backward pass is over."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _grads(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _entries(grads: Iterable[Tensor]) -> Tensor:
    return torch.cat([_sample(grad) for grad in grads])


def _sample(grad: Tensor) -> Tensor:
    count = min(grad.numel(), _ENTRIES)
    if not grad.is_contiguous():
        return grad.reshape(-1)[:count]
    return grad.as_strided((count,), (1,))  # one operation instead of two


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

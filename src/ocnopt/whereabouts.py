"""Where a graph of a step reads what is somewhere else, or another number, at each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ocnopt import intake, whole_step
from ocnopt.fused.launched import LaunchedActor
from ocnopt.layers.base import compute_dtype
from ocnopt.problem import Problem

if TYPE_CHECKING:
    from ocnopt.optimizer import OCNOpt


def readers_of(problem: Problem) -> list[LaunchedActor]:
    """Those who can be told where gradients are, if that is everybody. They hold on to none."""
    fused = [actor for actor in problem.actors if isinstance(actor, LaunchedActor)]
    for actor in fused:
        actor.let_go()
    return fused if len(fused) == len(problem.actors) else []


class Places:
    """Of what is on the tape, of gradients and of step sizes."""

    def __init__(
        self, opt: OCNOpt, taken: Sequence[Tensor], params: Sequence[Tensor], readers: list[LaunchedActor]
    ) -> None:
        """``readers``: if there are any, they are told where gradients are; else these are copied too."""
        self.device, self._readers = params[0].device, readers
        self._copied = () if readers else params
        self._inputs, self._rates = Inputs([*taken, *_grads(self._copied)]), Rates(opt)
        self._point()

    @property
    def pointing(self) -> bool:
        return bool(self._readers)

    def fill(self, taken: Sequence[Tensor]) -> bool:
        """With what the coming step is to read, unless that is of another kind."""
        taken = [*taken, *_grads(self._copied)] if self._copied else taken
        if not self._inputs.fit(taken) or not self._point():
            return False
        self._rates.follow()
        self._inputs.fill(taken)
        return True

    def _point(self) -> bool:
        return all(reader.reads(_grads(reader.shelf.params)) for reader in self._readers)

    @contextmanager
    def read(self, opt: OCNOpt) -> Iterator[None]:
        """Run a block in which a step reads from here."""
        tape, places, given = opt._tape, iter(self._inputs.places), _grads(self._copied)
        with nullcontext() if tape is None else intake.unharmed(tape), whole_step.reading(self._rates.places):
            if tape is not None:
                intake.put_back(tape, places)
            for p, place in zip(self._copied, places, strict=True):
                p.grad = place
            try:
                yield
            finally:
                for p, grad in zip(self._copied, given, strict=True):
                    p.grad = grad


def _grads(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


class Inputs:
    """Where a graph reads what is somewhere else at each step."""

    def __init__(self, taken: Sequence[Tensor]) -> None:
        self.places, self._kinds = [t.detach().clone() for t in taken], _kinds(taken)
        self._alike: dict[torch.dtype, list[int]] = {}
        for i, t in enumerate(taken):
            self._alike.setdefault(t.dtype, []).append(i)

    def fit(self, taken: Sequence[Tensor]) -> bool:
        return _kinds(taken) == self._kinds

    def fill(self, taken: Sequence[Tensor]) -> None:
        for index in self._alike.values():
            torch._foreach_copy_([self.places[i] for i in index], [taken[i] for i in index])


def _kinds(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [*map(attrgetter("shape", "dtype"), tensors)]


class Rates:
    """Where a graph reads step sizes. Those that are tensors on the device it reads themselves."""

    def __init__(self, opt: OCNOpt) -> None:
        self._groups = opt.param_groups
        self._kept = [group["lr"] for group in opt.param_groups]
        self._known: dict[int, float] = {}
        self.places: dict[int, Tensor] = {}
        for group in opt.param_groups:
            lr, p = group["lr"], next(iter(group["params"]), None)
            if p is not None and not (isinstance(lr, Tensor) and lr.device == p.device):
                self._known[id(group)] = float(lr)
                self.places[id(group)] = torch.full((), float(lr), dtype=compute_dtype(p.dtype), device=p.device)

    def follow(self) -> None:
        """A scheduler has changed them, maybe."""
        for group in self._groups:
            key = id(group)
            if key in self.places and self._known[key] != (lr := float(group["lr"])):
                self._known[key] = lr
                self.places[key].fill_(lr)

"""Does dimension 0 of what a layer reads and writes run over the samples? Where two sizes agree, they cannot tell."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ocnopt.capture import Tape
from ocnopt.environment import Environment
from ocnopt.layers.base import compute_dtype
from ocnopt.records import Pass, Rollout
from ocnopt.trees import mapped

#: module, which call of it, which tensor of the call
Place = tuple[str, int, str]
_INPUT = "input"


class _Looking(Rollout):
    """Shows the first input and the outputs of every module call to ``look``."""

    def __init__(self, look: Callable[[Place, Tensor], None]) -> None:
        self.look = look

    def before(self, name: str, occurrence: int, inputs: list[Tensor]) -> None:
        if inputs:
            self.look((name, occurrence, _INPUT), inputs[0])

    def after(self, name: str, occurrence: int, outputs: list[Tensor]) -> None:
        for i, t in enumerate(outputs):
            self.look((name, occurrence, f"output {i}"), t)


def mixed_layers(tape: Tape, this: Pass) -> frozenset[tuple[str, str]]:
    """The modules whose input or output does not follow when samples are exchanged, and which of their tensors.

    The model runs in evaluation mode and without gradients: as it is, with the samples rolled by one, and with one
    sample replaced by another. To follow one of the two is enough: where samples see each other (batch statistics) they
    still change places, and where random numbers are drawn a single sample still stays apart.
    """
    batch = this.batch
    if batch is None or batch < 2:
        return frozenset()
    environment = Environment.capture(tape.model)
    environment.rng, environment.idle = this.rng or environment.rng, this.idle
    environment.autocast = this.autocast or environment.autocast

    def run(exchange: Callable[[Tensor], Tensor], look: Callable[[Place, Tensor], None]) -> None:
        def exchanged(t: Tensor) -> Tensor:
            return exchange(t) if t.shape[:1] == (batch,) else t.clone()  # the model may overwrite its input

        args, kwargs = mapped(exchanged, (this.args, this.kwargs))
        tape.rollout = _Looking(look)
        try:
            with environment.repeated():
                tape.model.eval()
                tape.model(*args, **kwargs)
        finally:
            tape.rollout = None

    straight: dict[Place, Tensor] = {}
    following: set[Place] = set()

    def keep(place: Place, t: Tensor) -> None:
        if t.shape[:1] == (batch,):
            straight[place] = t.clone()  # it may be overwritten later

    def compare(follows: Callable[[Tensor, Tensor], bool]) -> Callable[[Place, Tensor], None]:
        def look(place: Place, t: Tensor) -> None:  # at once: one pass in memory is enough
            if place in straight and place not in following and follows(straight[place], t):
                following.add(place)

        return look

    try:
        run(Tensor.clone, keep)
        run(_roll, compare(_rolls))
        run(_replace_first, compare(_stays_apart))
    except Exception as error:  # whatever the model objects to, the step goes on
        why = f"the model does not run with its samples exchanged ({type(error).__name__}: {error})"
        warnings.warn(f"{why}, so no layer is taken to keep them in dimension 0", stacklevel=2)
        return frozenset((name, _INPUT) for name in this.order)
    return frozenset((name, which) for name, call, which in straight if (name, call, which) not in following)


def with_mixed_input(places: frozenset[tuple[str, str]]) -> frozenset[str]:
    """The modules to which samples do not come in dimension 0."""
    return frozenset(name for name, which in places if which == _INPUT)


def _roll(t: Tensor) -> Tensor:
    return t.roll(1, 0)


def _replace_first(t: Tensor) -> Tensor:
    return torch.cat([t[-1:], t[1:]])


def _rolls(x: Tensor, y: Tensor) -> bool:
    return _same(_roll(x), y)


def _stays_apart(x: Tensor, y: Tensor) -> bool:
    """Has the first row changed, and nothing else?"""
    if x.shape != y.shape or not _same(x[1:], y[1:]):
        return False
    return not torch.equal(x[0].nan_to_num(), y[0].nan_to_num())


def _same(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape:
        return False
    if not x.is_floating_point():
        return torch.equal(x, y)
    if not torch.equal(x.isfinite(), y.isfinite()):  # a bad batch is probed like any other
        return False
    x, y = (t.to(compute_dtype(t.dtype)).nan_to_num(0.0, 0.0, 0.0) for t in (x, y))
    return bool((x - y).abs().max() <= 1e-2 * x.abs().max()) if x.numel() else True

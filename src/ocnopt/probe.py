"""Does dimension 0 of what a layer reads and writes run over the samples? Where two sizes agree, they cannot tell."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ocnopt.capture import Tape
from ocnopt.environment import Environment
from ocnopt.records import Pass, Rollout
from ocnopt.trees import mapped


class _Seen(Rollout):
    """Keeps the first input and the outputs of every module call."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[str, int, str], Tensor] = {}

    def before(self, name: str, occurrence: int, inputs: list[Tensor]) -> None:
        if inputs:
            self.tensors[name, occurrence, "input"] = inputs[0].clone()  # it may be overwritten later

    def after(self, name: str, occurrence: int, outputs: list[Tensor]) -> None:
        for i, t in enumerate(outputs):
            self.tensors[name, occurrence, f"output {i}"] = t.clone()


def mixed_layers(tape: Tape, this: Pass) -> frozenset[str]:
    """The modules whose input or output does not follow when samples are exchanged.

    The model runs in evaluation mode and without gradients: as it is, with the samples rolled by one, and with one
    sample replaced by another. To follow one of the two is enough: where samples see each other (batch statistics) they
    still change places, and where random numbers are drawn a single sample still stays apart.
    """
    batch = this.batch
    if batch is None or batch < 2:
        return frozenset()
    environment = Environment.capture(tape.model)
    environment.autocast = this.autocast or environment.autocast

    def run(exchange: Callable[[Tensor], Tensor]) -> dict[tuple[str, int, str], Tensor]:
        def exchanged(t: Tensor) -> Tensor:
            return exchange(t) if t.shape[:1] == (batch,) else t.clone()  # the model may overwrite its input

        args, kwargs = mapped(exchanged, (this.args, this.kwargs))
        tape.rollout = seen = _Seen()
        try:
            with environment.repeated():
                tape.model.eval()
                tape.model(*args, **kwargs)
        finally:
            tape.rollout = None
        return seen.tensors

    try:
        straight, rolled, one = run(Tensor.clone), run(_roll), run(_replace_first)
    except Exception as error:  # whatever the model objects to, the step goes on
        why = f"the model does not run with its samples exchanged ({type(error).__name__}: {error})"
        warnings.warn(f"{why}, so no layer is taken to keep them in dimension 0", stacklevel=2)
        return frozenset(this.order)
    return frozenset(
        place[0]
        for place, x in straight.items()
        if x.shape[:1] == (batch,) and not (_rolls(x, rolled.get(place)) or _stays_apart(x, one.get(place)))
    )


def _roll(t: Tensor) -> Tensor:
    return t.roll(1, 0)


def _replace_first(t: Tensor) -> Tensor:
    return torch.cat([t[-1:], t[1:]])


def _rolls(x: Tensor, y: Tensor | None) -> bool:
    return _same(_roll(x), y)


def _stays_apart(x: Tensor, y: Tensor | None) -> bool:
    """Has the first row changed, and nothing else?"""
    if y is None or x.shape != y.shape or not _same(x[1:], y[1:]):
        return False
    return not torch.equal(x[0].nan_to_num(), y[0].nan_to_num())


def _same(x: Tensor, y: Tensor | None) -> bool:
    if y is None or x.shape != y.shape:
        return False
    if not x.is_floating_point():
        return torch.equal(x, y)
    if not torch.equal(x.isfinite(), y.isfinite()):  # a bad batch is probed like any other
        return False
    x, y = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (x, y))
    return bool((x - y).abs().max() <= 1e-2 * x.abs().max()) if x.numel() else True

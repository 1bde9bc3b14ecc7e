"""Does dimension 0 of a layer's input run over the samples? Sizes alone cannot tell when two of them agree."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ocnopt.capture import Pass, Rollout, Tape
from ocnopt.environment import Environment


class _Inputs(Rollout):
    """Keeps the first input of every module call."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], Tensor] = {}

    def before(self, name: str, occurrence: int, inputs: list[Tensor]) -> None:
        if inputs:
            self.seen[name, occurrence] = inputs[0]


def mixed_layers(tape: Tape, this: Pass) -> frozenset[str]:
    """The modules whose input does not follow when the samples change places.

    The model runs twice, in evaluation mode and without gradients: once as it is, once with the samples rolled by one.
    """
    if this.batch is None or this.batch < 2:
        return frozenset()

    def roll(t: Tensor) -> Tensor:
        return t.roll(1, 0) if t.shape[:1] == (this.batch,) else t

    environment = Environment.capture(tape.model)
    environment.autocast = this.autocast or environment.autocast
    straight, rolled = _Inputs(), _Inputs()
    try:
        for follower, (args, kwargs) in (
            (straight, (this.args, this.kwargs)),
            (rolled, tree_map_only(Tensor, roll, (this.args, this.kwargs))),
        ):
            tape.rollout = follower
            with environment.repeated():
                tape.model.eval()
                tape.model(*args, **kwargs)
    finally:
        tape.rollout = None
    return frozenset(
        name
        for (name, occurrence), x in straight.seen.items()
        if x.shape[:1] == (this.batch,) and not _same(x.roll(1, 0), rolled.seen.get((name, occurrence)))
    )


def _same(x: Tensor, y: Tensor | None) -> bool:
    if y is None or x.shape != y.shape:
        return False
    if not x.is_floating_point():
        return torch.equal(x, y)
    x, y = x.double(), y.double()
    return bool((x - y).abs().max() <= 1e-2 * x.abs().max()) if x.numel() else True

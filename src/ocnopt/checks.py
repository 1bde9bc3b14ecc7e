"""What can be wrong when a step is asked for, found before anything is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ocnopt import arguments
from ocnopt.capture import Tape
from ocnopt.distributed import World, check_known, check_steps
from ocnopt.records import Need
from ocnopt.terms import Terms


def gradients(parameters: Iterable[Tensor]) -> None:
    for p in parameters:
        grad = p.grad
        if grad is not None and (grad.layout != torch.strided or grad.is_complex()):
            kind = "complex" if grad.is_complex() else "sparse"
            raise RuntimeError(f"OCNOpt does not support {kind} gradients (a parameter of shape {tuple(p.shape)})")


def weights(tape: Tape | None, need: Need, why: str | None) -> None:
    """``why``: the argument that looks at layers."""
    if tape is not None and tape.borrowed and (need.calls or need.states):
        raise RuntimeError(
            f"{why} needs passes of the attached model with its own weights, but gradients came "
            f"through functional_call with others: use rank=1, feedback='linear' and adaptive curvature"
        )


def processes(terms: Terms, world: World | None, wrapper: Callable[[], nn.Module | None]) -> None:
    """``wrapper``: the ``DistributedDataParallel`` around the network, if any."""
    for group, why in terms.together:
        if world is None:
            check_known(why)
        elif world.size > 1:
            check_steps(wrapper(), why)
            if (refused := arguments.why_not_together(group)) is not None:
                raise RuntimeError(f"{refused} (a network that {world.size} processes train together)")

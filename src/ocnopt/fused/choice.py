"""Who acts by fused kernels, and by which."""

from __future__ import annotations

import torch
from torch import Tensor

from ocnopt.curvature import BY_NAME, Adaptive
from ocnopt.fused import support
from ocnopt.fused.actor import FusedActor
from ocnopt.fused.launched import LaunchedActor
from ocnopt.fused.native import binding as native
from ocnopt.fused.native.actor import NativeActor
from ocnopt.fused.tables import Layout
from ocnopt.gradients import Columns, Explicit
from ocnopt.moment import Moment
from ocnopt.shelves import Shelf


def why_not(shelf: Shelf, rank: int, paper: bool, alone: bool) -> str | None:
    """Why the players of a shelf do not act by fused kernels. ``alone``: has this process the whole batch?"""
    if rank > support.MOST_GROUPS:
        return f"rank must be {support.MOST_GROUPS} or less"
    if rank > 1 and shelf.kind is not Explicit:
        return "its gradient is not split by groups of samples"
    if shelf.kind is Explicit and not alone:
        return "groups of samples are spread over several processes"
    if paper:
        return "bellman must be 'consistent'"
    if shelf.curvature is not BY_NAME["identity"] and shelf.curvature is not BY_NAME["adaptive"]:
        return "curvature must be 'identity' or 'adaptive'"
    if shelf.params[0].dtype not in support.KINDS:
        return f"parameters of {shelf.params[0].dtype} are not supported"
    why = support.why_not_on(shelf.params[0].device)
    if why is not None and shelf.params[0].device.type == "cpu":
        return native.why_not(shelf.params[0].dtype)
    return why


def takes_parts(shelf: Shelf) -> bool:
    """Do the kernels take columns of parts of parameters?"""
    return _kind(shelf) is NativeActor


def _kind(shelf: Shelf) -> type[FusedActor]:
    return LaunchedActor if support.why_not_on(shelf.params[0].device) is None else NativeActor


def acting(
    shelf: Shelf, grads: list[Tensor], columns: Columns | None, fractions: Tensor, maximize: bool
) -> FusedActor | None:
    """One that has looked at the gradients; or ``None``, where that cannot be done for once."""
    if _starts_late(shelf) or len({g.dtype for g in grads}) > 1:
        return None
    kind = _kind(shelf)
    if shelf.layout is None:
        shelf.layout = Layout(shelf.parts(shelf.params), kind.chunk())
    moment = Moment(shelf.states[0]["step"], torch.float32, (shelf.group["momentum"], shelf.group["decay"]))
    actor = kind(shelf, moment, grads, columns, fractions, shelf.layout, -1 if maximize else 1)
    return actor if actor.look() else None


def _starts_late(shelf: Shelf) -> bool:
    """Is a second moment missing though its clock has been running, after a change of curvature? Then it is right at
    once, which these kernels know nothing of.
    """
    if shelf.clock_is_new or not isinstance(shelf.curvature, Adaptive):
        return False
    return any("second_moment" not in state for state in shelf.states)

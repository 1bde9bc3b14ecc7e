"""Parameters of which every process holds a part, as ``fully_shard`` leaves them.

The optimizer works on the parts. What is a sum over the entries of a parameter is added up over their owners.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

from ocnopt.distributed import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_sharded(t: Tensor) -> TypeGuard[DTensor]:
    library = sys.modules.get("torch.distributed.tensor")  # who has not imported it has none
    return library is not None and isinstance(t, library.DTensor)


def local(t: Tensor) -> Tensor:
    """The part that this process holds; shares its memory. (Without gradients: within a step there are none.)"""
    if not is_sharded(t):
        return t
    part: Tensor = t.to_local()
    return part


def parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Of each what :func:`local` gives."""
    library = sys.modules.get("torch.distributed.tensor")
    if library is None:
        return list(tensors)
    return [t.to_local() if isinstance(t, library.DTensor) else t for t in tensors]


def owners(p: Tensor) -> World:
    """The processes that hold a parameter together."""
    if not is_sharded(p):
        return World()
    parted = [i for i, placement in enumerate(p.placements) if placement.is_shard()]
    return _along(p.device_mesh, parted[0]) if parted else World()


def everybody(params: Iterable[Tensor]) -> list[World]:
    """All processes that hold a part or a copy of any of the parameters: the lines of their meshes."""
    meshes = {p.device_mesh for p in params if is_sharded(p)}
    return [_along(mesh, i) for mesh in meshes for i in range(mesh.ndim)]


@lru_cache(maxsize=64)
def _along(mesh: DeviceMesh, i: int) -> World:
    return World(mesh.get_group(i))


def check(params: Iterable[Tensor], model: nn.Module | None, why_whole: str | None) -> None:
    """Raise for what cannot be done with parts of parameters. ``why_whole``: which argument needs whole layers."""
    params = list(params)
    if _is_flattened(params, model):
        raise RuntimeError(
            "FullyShardedDataParallel leaves each process a part of the parameters without saying which: use "
            "torch.distributed.fsdp.fully_shard"
        )
    parts = [p for p in params if is_sharded(p)]
    if not parts:
        return
    if why_whole is not None:
        raise RuntimeError(
            f"{why_whole} needs whole layers, and fully_shard leaves each process a part of them: use identity or "
            f"adaptive curvature with feedback='linear', rank=1 or with feedback='off'"
        )
    if len({p.device_mesh for p in parts}) > 1:
        raise RuntimeError("the parameters are sharded over different meshes; OCNOpt supports one")
    for p in parts:
        parted, copied = sum(q.is_shard() for q in p.placements), sum(q.is_replicate() for q in p.placements)
        if parted > 1 or parted + copied < len(p.placements):
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} is placed as {p.placements}; OCNOpt supports what fully_shard "
                f"does by itself, parts along one dimension of the mesh"
            )


def _is_flattened(params: Iterable[Tensor], model: nn.Module | None) -> bool:
    """Is it the older FullyShardedDataParallel?"""
    library = sys.modules.get("torch.distributed.fsdp")
    if library is None:
        return False
    wrapped = model is not None and any(isinstance(m, library.FullyShardedDataParallel) for m in model.modules())
    return wrapped or any(isinstance(p, library.FlatParameter) for p in params)

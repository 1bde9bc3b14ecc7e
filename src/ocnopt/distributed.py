"""Other processes that train the same network: what is added up over them, what they must agree on, who does what.

A :class:`World` of one process answers everything by itself, so nobody else has to ask how many there are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

#: numbers in one message
_MESSAGE = 1 << 24


class World:
    """The processes that train one network together. All of them must make the same calls in the same order."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, World) and self.group is other.group

    def __hash__(self) -> int:
        return hash(self.group)

    def __init__(self, group: ProcessGroup | None = None) -> None:
        if not (group is None or isinstance(group, dist.ProcessGroup)):
            raise TypeError(f"process_group must be a ProcessGroup of this process, False or None, got {group!r}")
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Add up over the processes, in place: many tensors in one message."""
        if self.size == 1:
            return
        for alike in _messages(tensors):
            flat = torch.cat([t.reshape(-1) for t in alike]).to(self._within_reach(alike[0].device))
            dist.all_reduce(flat, group=self.group)
            parts = flat.to(alike[0].device).split([t.numel() for t in alike])
            for t, total in zip(alike, parts, strict=True):
                t.copy_(total.view(t.shape))

    def total(self, t: Tensor) -> Tensor:
        """The sum over the processes."""
        if self.size == 1:
            return t
        total = t.clone()
        self.sum_([total])
        return total

    def minimum(self, flags: Tensor) -> Tensor:
        """Of booleans: those that hold on every process. Does not wait for the device."""
        if self.size == 1:
            return flags
        numbers = flags.to(self._within_reach(flags.device), torch.int32)  # not every backend knows booleans
        dist.all_reduce(numbers, dist.ReduceOp.MIN, group=self.group)
        return numbers.to(flags.device, flags.dtype)

    def gather_ints(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each process has, by rank; equally many everywhere.

        Waits for the device if the backend knows no other (``"nccl"`` alone; ``"cpu:gloo,cuda:nccl"`` knows two).
        """
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._within_reach(torch.device("cpu")))
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(theirs, mine, group=self.group)
        return [list(map(int, each)) for each in torch.stack(theirs).tolist()]

    def every(self, holds: bool) -> bool:
        """Does it hold on all processes?"""
        return all(each for (each,) in self.gather_ints([holds]))

    def must_agree(self, value: str, otherwise: str) -> None:
        """Raise on all processes if one of them has another value: they would wait for each other forever."""
        if self.size > 1 and len({tuple(each) for each in self.gather_ints([zlib.crc32(value.encode())])}) > 1:
            raise RuntimeError(f"the {self.size} processes that train this network together {otherwise}")

    def share(self, costs: Sequence[float]) -> list[int]:
        """Which process does which piece of work."""
        return share_out(costs, self.size)

    def portions(self, work: Sequence[T]) -> Iterator[Sequence[T]]:
        """All of it at once, so that messages are few; alone, piece by piece, so that little is held at a time."""
        if self.size > 1:
            yield work
        else:
            yield from ([piece] for piece in work)

    def _within_reach(self, device: torch.device) -> torch.device:
        """The device, or one that the backend can send from."""
        return device if device.type in self._devices else self._device

    @cached_property
    def _devices(self) -> list[str]:
        return [each.partition(":")[0] for each in dist.get_backend_config(self.group).split(",")]

    @cached_property
    def _device(self) -> torch.device:
        kind = self._devices[0]
        return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def _messages(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors that fit into one message: of one dtype and device, and not too many numbers."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in tensors:
        by_kind.setdefault((t.dtype, t.device), []).append(t)
    for alike in by_kind.values():
        message, numbers = list[Tensor](), 0
        for t in alike:
            if message and numbers + t.numel() > _MESSAGE:
                yield message
                message, numbers = [], 0
            message.append(t)
            numbers += t.numel()
        yield message


def share_out(costs: Sequence[float], among: int) -> list[int]:
    """Who does which piece of work: the largest first, each to the one that has least to do."""
    load, owners = [0.0] * among, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = load.index(min(load))
        load[owners[i]] += costs[i]
    return owners


# --- who is there ---


def unwrapped(model: nn.Module) -> tuple[nn.Module, ProcessGroup | None]:
    """The network inside a DistributedDataParallel, and the processes that share it."""
    if not isinstance(model, DistributedDataParallel):
        return model, None
    network: nn.Module = model.module
    return network, model.process_group


def check_steps(wrapper: nn.Module | None, why: str) -> None:
    """Raise inside ``join()``, where a process that has no batch left takes no more steps."""
    if isinstance(wrapper, DistributedDataParallel) and wrapper._join_config.enable:
        raise RuntimeError(
            f"{why} needs all processes in each step, and inside join() one may stop before the others: give them "
            f"equally many batches, empty ones if need be"
        )


def check_known(why: str) -> None:
    """Raise where there are other processes, and nobody has said which of them train the same network."""
    if dist.is_available() and dist.is_initialized() and (count := dist.get_world_size()) > 1:
        raise RuntimeError(
            f"{why} reads more than gradients, and there are {count} processes: pass the DistributedDataParallel as "
            f"model=, or process_group=torch.distributed.group.WORLD if the model is wrapped elsewhere, or "
            f"process_group=False if each process trains a network of its own"
        )

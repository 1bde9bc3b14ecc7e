"""Two processes on this machine, started once for many checks: a start takes seconds."""

from __future__ import annotations

import os
import socket
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init_process_group, or gloo's threads outlive destroy_process_group
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ocnopt import OCNOpt

SIZE = 2

#: run in both processes, and raises in one of them if something is wrong
Check = Callable[[int], None]


def run(checks: Sequence[Check]) -> None:
    """All checks in one test: tests of a file may be spread over several workers, and each would start two processes.

    The first failure ends it, since then the two are out of step.
    """
    answers: Any = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_work, args=(_free_port(), checks, answers), nprocs=SIZE)
    found = [answers.get() for _ in range(SIZE)]
    assert not any(found), "\n".join(found)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _work(rank: int, port: int, checks: Sequence[Check], answers: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=SIZE, timeout=timedelta(seconds=20))
    for check in checks:
        try:
            check(rank)
        except Exception:
            answers.put(f"process {rank}, {check.__name__}:\n{traceback.format_exc()}")
            os._exit(0)  # the other process waits for us, and torch would wait for it
    answers.put("")
    dist.destroy_process_group()


# --- what checks are made of ---


def shared(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **options)


def mine(rank: int, *batch: Tensor) -> tuple[Tensor, ...]:
    """The half of the rows that this process has."""
    return tuple(t.chunk(SIZE)[rank] for t in batch)


def assert_close(ours: Iterable[Tensor], theirs: Iterable[Tensor], rtol: float = 1e-9, atol: float = 1e-11) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=rtol, atol=atol)


def assert_same_everywhere(tensors: Iterable[Tensor]) -> None:
    """Bit for bit."""
    flat = torch.cat([t.detach().flatten().double() for t in tensors])
    theirs = [torch.empty_like(flat) for _ in range(SIZE)]
    dist.all_gather(theirs, flat)
    assert torch.equal(theirs[0], theirs[1])


def floats(opt: OCNOpt) -> list[Tensor]:
    """All of the state that is made of numbers."""
    kept = [v for own in opt.state.values() for v in own.values()]
    return [torch.as_tensor(v, dtype=torch.float64) for v in kept]

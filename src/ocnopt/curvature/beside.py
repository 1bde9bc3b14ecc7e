"""Eigendecompositions beside the steps.

On CUDA they wait for the device, many times. So that no step does, a thread of its own makes them, on a stream of its
own, and what comes out is fetched by a step that is chosen beforehand. Elsewhere there is nothing to gain: they are
made when they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ocnopt.curvature.eigen import Eigen, batched

#: what is being made, and when it is there, by the first of the matrices. Whoever copies or loads a matrix has nothing
#: under way: then it is begun when it is asked for
_jobs = WeakTensorKeyDictionary()


def begin(matrices: Sequence[Tensor]) -> None:
    """Of matrices that nobody changes any more."""
    if _is_beside(matrices[0]):
        stream = _stream(matrices[0].device)
        ready = torch.cuda.current_stream(matrices[0].device).record_event()
        _jobs[matrices[0]] = _worker().submit(_made, list(matrices), stream, ready)


def finish(matrices: Sequence[Tensor]) -> list[Eigen | None]:
    """``None``: it failed. Waits if it must; the numbers do not depend on when it was begun."""
    if not _is_beside(matrices[0]):
        return batched(matrices)
    if matrices[0] not in _jobs:
        begin(matrices)
    job: Future[list[Eigen | None]] = _jobs.pop(matrices[0])
    found = job.result()
    present = torch.cuda.current_stream(matrices[0].device)
    for t in (t for pair in found if pair is not None for t in pair):
        t.record_stream(present)  # it was made on another one
    return found


def wait() -> None:
    """Until nothing is under way: what looks at all that happens on the device shall see one step alone."""
    if _worker.cache_info().currsize:
        _worker().submit(int).result()  # there is one thread, which takes one after another


def _is_beside(matrix: Tensor) -> bool:
    return matrix.is_cuda


def _made(matrices: list[Tensor], stream: torch.cuda.Stream, ready: torch.cuda.Event) -> list[Eigen | None]:
    """Until the device is done, so that the step which fetches it has no event to deal with: while the next one copies
    to the host, CUDA lets whoever makes or drops an event wait, on any stream.
    """
    with torch.no_grad(), torch.cuda.device(stream.device), torch.cuda.stream(stream):
        stream.wait_event(ready)
        try:
            found = batched(matrices)
        except Exception:  # such as too little memory: the old basis goes on
            found = [None] * len(matrices)
        stream.record_event().synchronize()
        return found


@lru_cache(maxsize=1)
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "ocnopt-eigenbases")


@lru_cache(maxsize=64)
def _stream(device: torch.device) -> torch.cuda.Stream:
    torch.linalg.eigh(torch.eye(2, device=device))  # loads libraries, which two threads must not do at a time
    return torch.cuda.Stream(device)

"""A training step, or a part of it, captured in a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from ocnopt import whole_step
from ocnopt.clockwork import Clockwork
from ocnopt.curvature import beside
from ocnopt.games.flow import Flow

T = TypeVar("T")


@dataclass(eq=False)
class Recording(Generic[T]):
    """What was captured: the first step as far as Python is concerned. On the device that is the first replay."""

    graph: torch.cuda.CUDAGraph
    result: T  # of the function that was captured: in memory that each replay overwrites
    clockwork: Clockwork
    own: whole_step.Capture  # what it reads, and nobody else may have any more
    _behind: bool = True

    def replay(self) -> None:
        self.graph.replay()
        if not self._behind:
            self.clockwork.tick()
        self._behind = False


class Studio:
    """Where graphs are captured: their stream and their memory, which is that of all of them since they take turns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=-1)  # goes before eigendecompositions
        self._pool: Any = None
        self._graphs: WeakSet[Recording[Any]] = WeakSet()

    def record(
        self, run: Callable[[], T], opt: Optimizer, flow: Flow | None, of: whole_step.Capture | None = None
    ) -> Recording[T] | str:
        """Capture ``run``, or say why not. Nothing runs on the device. ``of``: less than a whole step."""
        beside.wait()
        wheels, present = Clockwork(opt, flow, of is None or of.whole), torch.cuda.current_stream()
        if not self._graphs:  # memory is given back with the last of them, and cannot be asked for again
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # other threads may go on with what they do, such as pinning memory for the batches to come
        capturing = torch.cuda.graph(graph, self._pool, self.stream, capture_error_mode="thread_local")
        try:
            with whole_step.captured(of) as own, _own_workspaces(), capturing:
                result = run()
            why = wheels.stop()
        except BaseException as error:
            torch.cuda.set_stream(present)
            _mend(self.device)
            wheels.undo()
            if not isinstance(error, Exception):
                raise
            first = error if error.__context__ is None else error.__context__
            return f"the capture failed ({type(first).__name__}: {(str(first).splitlines() or [''])[0]})"
        if why is not None:
            wheels.undo()
            return why
        for act in own.later:
            act()
        own.later.clear()
        recording = Recording(graph, result, wheels, own)
        self._graphs.add(recording)
        return recording


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """What the matrix library takes for itself in the block is the graph's, which uses nothing of what ordinary steps
    may give back, nor they what is the graph's.
    """
    _give_up_workspaces()
    try:
        yield
    finally:
        _give_up_workspaces()


def _give_up_workspaces() -> None:
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()


def _mend(device: torch.device) -> None:
    """After a capture that failed the generator may believe that it is still underway, and refuse to draw."""
    state = torch.cuda.get_rng_state(device)
    try:
        torch.rand(1, device=device)
    except RuntimeError:
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())
    torch.cuda.set_rng_state(state, device)


@contextmanager
def told_of_waiting(places: list[str]) -> Iterator[None]:
    """Collects where the host waits for the device, as far as torch knows. A capture that fails leaves torch in
    disorder: who is about to make one finds out beforehand.
    """
    beside.wait()  # other threads may wait
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for each in caught:
        if "synchronizing CUDA operation" in str(each.message):
            places.append(f"{Path(each.filename).name}, line {each.lineno}")
        elif "Synchronization debug mode" not in str(each.message):  # it calls itself a prototype
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)

"""Train many networks, a few at a time, each in a process of its own."""

from __future__ import annotations

import os
import queue
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch

from ocnopt.lab.runs import Record, RunError, RunFolder, replace_file
from ocnopt.lab.training import Folder, train
from ocnopt.lab.world import is_torchrun

#: is told of every record of every run; also ``{"kind": "warning", "message"}`` and ``{"kind": "error", "message"}``
PoolListener = Callable[[RunFolder, Record], None]

ERROR_FILE = "error.txt"


@dataclass(frozen=True)
class Outcome:
    """What became of a run: its ``final`` record or, where it failed, one line that says why."""

    folder: RunFolder
    final: Record | None
    error: str | None = None


@dataclass(frozen=True)
class Setup:
    """What all runs of a pool share."""

    device: str = "cpu"
    data_dir: Folder | None = None
    download: bool = False
    tensorboard: bool = False
    threads: int = 1


def train_all(
    folders: Sequence[RunFolder], setup: Setup, workers: int, listen: PoolListener | None = None
) -> list[Outcome]:
    """Train what is not finished in these folders. A run that fails leaves its error beside it and stops no other.

    With one worker everything happens in this process. The networks are small, so each process uses ``threads``
    threads: one, unless told otherwise.
    """
    if is_torchrun():
        raise RunError("several runs at a time are started without torchrun: use --workers instead")
    tell = listen or (lambda folder, record: None)
    if workers <= 1:
        with _threads(setup.threads):
            return [_train_one(folder.path, setup, partial(tell, folder)) for folder in folders]
    return _train_in_processes(folders, setup, min(workers, len(folders)), tell)


def default_workers(device: torch.device) -> int:
    """A process per core; on a GPU, one."""
    return 1 if device.type == "cuda" else min(os.cpu_count() or 1, 8)


def _train_one(path: Path, setup: Setup, tell: Callable[[Record], None]) -> Outcome:
    folder = RunFolder(path)
    error_path = path / ERROR_FILE
    error_path.unlink(missing_ok=True)
    try:
        final = train(
            folder,
            device=setup.device,
            data_dir=setup.data_dir,
            download=setup.download,
            tensorboard=setup.tensorboard,
            listen=tell,
        )
    except Exception as error:
        replace_file(error_path, traceback.format_exc().encode())
        message = f"{type(error).__name__}: {error}"
        tell({"kind": "error", "message": message})
        return Outcome(folder, None, message)
    return Outcome(folder, final)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- processes ---

_events: Any = None  # in a worker: the way back to the parent


def _start_worker(events: Any, threads: int) -> None:
    global _events
    _events = events
    torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker at once; its run can be continued


def _work(path: Path, setup: Setup) -> Outcome:
    def tell(record: Record) -> None:
        _events.put((path, record))

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: tell({"kind": "warning", "message": str(message)})
        return _train_one(path, setup, tell)


def _train_in_processes(folders: Sequence[RunFolder], setup: Setup, workers: int, tell: PoolListener) -> list[Outcome]:
    context = get_context("spawn")  # forked processes and threads or GPUs do not go together
    others = active_children()
    events = context.Queue()
    pool = ProcessPoolExecutor(workers, context, _start_worker, (events, setup.threads))
    by_path = {folder.path: folder for folder in folders}
    try:
        futures = [pool.submit(_work, folder.path, setup) for folder in folders]
        while not all(future.done() for future in futures):
            _pass_on(events, by_path, tell, wait=0.1)
        _pass_on(events, by_path, tell, wait=0.1)
        return [_outcome(future) for future in futures]
    except BaseException:  # nobody waits for the runs under way: they can be continued
        for worker in set(active_children()) - set(others):
            worker.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _pass_on(events: Any, folders: dict[Path, RunFolder], tell: PoolListener, wait: float) -> None:
    """Everything that has arrived; waits for the first."""
    try:
        while True:
            path, record = events.get(timeout=wait)
            tell(folders[path], record)
    except queue.Empty:
        pass


def _outcome(future: Future[Outcome]) -> Outcome:
    try:
        return future.result()
    except BrokenProcessPool:
        raise RunError("a worker process was killed: continue what it left with --resume") from None

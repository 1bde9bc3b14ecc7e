"""Start the workers of a sweep on this machine, and watch over them."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import FrameType

import torch

from ocnopt.lab.recipes import read_recipe
from ocnopt.lab.runs import Record
from ocnopt.lab.sweep.board import ATTEMPTS, Board, Entry, settled
from ocnopt.lab.sweep.points import Point, points_of
from ocnopt.lab.sweep.storage import Pulse
from ocnopt.lab.sweep.worker import Watch, work
from ocnopt.lab.training import train
from ocnopt.lab.world import find_device

#: seconds for which workers may give back their trials, once they are told to stop
PATIENCE = 10.0


class SweepError(Exception):
    """A sweep cannot go on. One sentence that says why."""


@dataclass(frozen=True)
class SweepOptions:
    """Everything that a worker needs to know; workers of one sweep differ in nothing of it but the folder.

    Attributes:
        recipe: its file, or the name of one that comes along.
        storage: the path of a SQLite file, or the URL of a PostgreSQL database.
        study: the name of the sweep there.
        folder: of the runs.
        grids: the keys of those to search; all of them when empty.
        seeds: each setting is run with each of them.
        settings: only these (:attr:`Point.setting`); all of them when empty.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        data_dir, download: as in :func:`ocnopt.lab.data.load`.
        pulse: when a worker counts as dead.
    """

    recipe: str
    storage: str
    study: str
    folder: Path
    grids: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    settings: tuple[str, ...] = ()
    device: str = "cpu"
    data_dir: str | None = None
    download: bool = False
    pulse: Pulse = field(default_factory=Pulse)

    def points(self) -> list[Point]:
        points = points_of(read_recipe(self.recipe), grids=self.grids, seeds=self.seeds)
        return [point for point in points if not self.settings or point.setting in self.settings]

    def board(self) -> Board:
        return Board(self.storage, self.study, self.pulse)

    def train(self) -> partial[Record]:
        return partial(train, device=find_device(self.device), data_dir=self.data_dir, download=self.download)


def run_sweep(options: SweepOptions, workers: int = 1, watch: Watch | None = None) -> list[Entry]:
    """Do all that is left of a sweep, and say how it went.

    It can be stopped and started again at any point, here or elsewhere, beside any number of others that do the same.

    Args:
        options: the sweep.
        workers: processes on this machine. One works in this very process, as each does under ``torchrun``.
        watch: is shown the board now and then.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    points, board = options.points(), options.board()
    try:
        if workers == 1:
            work(board, points, options.folder, options.train(), pulse=options.pulse, watch=watch)
        else:
            _Crew(options, workers).run(board, points, watch)
        return board.survey(points)
    finally:
        board.close()


class _Crew:
    """Worker processes. One that dies is replaced: its trial is taken up when its grace period is over."""

    def __init__(self, options: SweepOptions, workers: int) -> None:
        self._options, self._workers = options, workers
        self._deaths = 0
        self._processes: list[SpawnProcess] = []

    def run(self, board: Board, points: Sequence[Point], watch: Watch | None) -> None:
        try:
            self._processes = [self._start() for _ in range(self._workers)]
            while not settled(entries := board.survey(points)):
                if watch is not None:
                    watch(entries)
                self._replace_dead()
                time.sleep(0.5)
            if watch is not None:
                watch(entries)
        finally:
            for process in self._processes:
                process.terminate()  # those that have nothing left to do are ending anyway
            self._wait()

    def _wait(self) -> None:
        """Until all have ended. One that does not is killed, and its trial taken up again like that of a dead one."""
        deadline = time.monotonic() + PATIENCE
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()

    def _start(self) -> SpawnProcess:
        # "spawn": a fork of a process that has used torch or a database must not use either
        process = multiprocessing.get_context("spawn").Process(
            target=_worker_process, args=(self._options, self._workers), name="ocnopt-sweep-worker"
        )
        process.start()
        return process

    def _replace_dead(self) -> None:
        for i, process in enumerate(self._processes):
            if process.exitcode is None or process.exitcode == 0:
                continue
            self._deaths += 1
            if self._deaths > ATTEMPTS * self._workers:
                raise SweepError(f"{self._deaths} workers have died, the last with exit status {process.exitcode}")
            self._processes[i] = self._start()


def _worker_process(options: SweepOptions, workers: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to everybody; the parent decides
    stop = _Stop()
    signal.signal(signal.SIGTERM, stop)
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    parent = multiprocessing.parent_process()
    assert parent is not None
    train = partial(options.train(), listen=stop.listen)
    board = options.board()
    try:
        work(
            board,
            options.points(),
            options.folder,
            train,
            pulse=options.pulse,
            go_on=lambda: parent.is_alive() and not stop.asked,
        )
    finally:
        board.close()


class _Stop:
    """Ends the process, wherever it is, at the first SIGTERM; later ones must not disturb the giving back of the trial.

    Python swallows what a handler raises inside ``__del__`` or the callback of a weak reference. So the wish is also
    remembered, and met before the next record of the run or the next claim.
    """

    def __init__(self) -> None:
        self.asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked = True
            raise SystemExit(0)

    def listen(self, record: Record) -> None:
        if self.asked:
            raise SystemExit(0)

"""One worker: claim a point, run it, write down how it went, until nothing is left."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import OperationalError

from ocnopt.lab.runs import Record, RunError, RunFolder
from ocnopt.lab.sweep.board import Board, Claim, Entry, settled
from ocnopt.lab.sweep.points import Point
from ocnopt.lab.sweep.storage import Pulse
from ocnopt.lab.tasks import score

T = TypeVar("T")

#: trains what is in a folder and returns the ``final`` record, as :func:`ocnopt.lab.training.train` does
Train = Callable[[RunFolder], Record]
Watch = Callable[[Sequence[Entry]], None]

#: seconds for which a database that does not answer is asked again
_PATIENCE = 600.0


def work(
    board: Board,
    points: Sequence[Point],
    folder: Path,
    train: Train,
    *,
    pulse: Pulse | None = None,
    watch: Watch | None = None,
    go_on: Callable[[], bool] = lambda: True,
) -> None:
    """Run points until every one is done or has failed, whoever ran it.

    While others are still at theirs it waits: should one of them die, its point is taken up here.

    Args:
        board: where points are claimed.
        points: the sweep.
        folder: of the runs, one folder a point. A point that is taken up again goes on from its last checkpoint
            where this folder is still the same.
        train: does a run.
        pulse: how often to show life.
        watch: is shown the board after every change.
        go_on: asked before every claim; ``False`` ends the work.
    """
    pulse = pulse or Pulse()
    while go_on():
        claim = _patiently(lambda: board.claim(points))
        if claim is not None:
            _run(board, claim, folder, train, pulse)
        entries = _patiently(lambda: board.survey(points))
        if watch is not None:
            watch(entries)
        if settled(entries):
            return
        if claim is None:
            time.sleep(min(pulse.interval, pulse.grace / 4))


def _run(board: Board, claim: Claim, folder: Path, train: Train, pulse: Pulse) -> None:
    with _alive(board, claim, pulse):
        try:
            run = _open_folder(folder, claim)
            final = train(run)
            value, notes = _outcome(run, final)
        except Exception as error:
            kept = f"{type(error).__name__}: {error}", traceback.format_exc()
            _patiently(lambda: board.fail(claim, *kept))
            return
        except BaseException:  # stopped from outside
            board.release(claim)
            raise
        _patiently(lambda: board.complete(claim, value, notes))


def _open_folder(folder: Path, claim: Claim) -> RunFolder:
    """The folder of the point; another one while a worker that was given up still writes there."""
    run = RunFolder(folder / claim.point.key)
    try:
        if not run.exists():
            return RunFolder.create(run.path, claim.point.config.table())
        with run.locked():
            return run
    except RunError:
        return RunFolder.create(folder / f"{claim.point.key}-trial{claim.number}", claim.point.config.table())


def _outcome(run: RunFolder, final: Record) -> tuple[float, Record]:
    last = run.metrics("epoch")[-1]
    kept = ("test_accuracy", "test_loss", "train_loss", "seconds", "diverged")
    notes = {key: final[key] for key in kept if key in final}
    return score(last, "validation"), {**notes, "folder": str(run.path)}


@contextmanager
def _alive(board: Board, claim: Claim, pulse: Pulse) -> Iterator[None]:
    """Show signs of life from a second thread."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(pulse.interval):
            try:
                board.show_life(claim.trial_id)
            except (StorageInternalError, OperationalError):
                continue  # the database may come back before the grace period is over

    thread = threading.Thread(target=beat, name="sweep-pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _patiently(ask: Callable[[], T]) -> T:
    """Ask the database, again and again while it does not answer: a restart of it must not cost a run."""
    deadline, pause = time.monotonic() + _PATIENCE, 0.5
    while True:
        try:
            return ask()
        except (StorageInternalError, OperationalError):
            if time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, 30.0)

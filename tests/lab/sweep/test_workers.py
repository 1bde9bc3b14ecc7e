"""Workers that are killed, stopped, or whose database goes away: nothing is lost and nothing is done twice."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from tests.lab.sweep.conftest import Server
from tests.lab.sweep.recipes import PATIENT, PULSE, small_recipe, small_sweep

from ocnopt.lab import training
from ocnopt.lab.runs import Record, RunFolder, find_runs
from ocnopt.lab.sweep import Board, Standing, SweepOptions, launch, points_of, run_sweep, work
from ocnopt.lab.sweep.board import Entry

POINTS = points_of(small_recipe(), grids=["plain"])


def wait_for(happened: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def completed(options: SweepOptions) -> Counter[str]:
    board = options.board()
    trials = [t.user_attrs["point"] for t in board.trials() if t.state is TrialState.COMPLETE]
    board.close()
    return Counter(trials)


def pretend(run: RunFolder) -> Record:
    """A run of no time at all."""
    run.metrics_path.write_text('{"kind": "epoch", "validation_accuracy": 0.75}\n')
    return {"kind": "final", "test_accuracy": 0.5, "train_loss": 1.0, "seconds": 0.1, "diverged": False}


def test_two_workers_one_killed_in_the_middle_of_a_trial(tmp_path: Path, storage: str, study: str) -> None:
    options, marker = small_sweep(tmp_path, storage, study), tmp_path / "stuck"
    (tmp_path / "options").write_bytes(pickle.dumps(options))
    script = Path(__file__).with_name("stuck_worker.py")
    victim = subprocess.Popen([sys.executable, str(script), str(tmp_path / "options"), str(marker)])
    survivor = threading.Thread(target=run_sweep, args=(options,))
    try:
        wait_for(marker.exists)
        survivor.start()
        wait_for(lambda: len(completed(options)) > 2)  # they work side by side
    finally:
        victim.kill()
        assert victim.wait() == -signal.SIGKILL
    survivor.join(timeout=60)
    assert completed(options) == Counter(point.key for point in options.points())
    board = options.board()
    (abandoned,) = (t for t in board.trials() if t.state is not TrialState.COMPLETE)
    board.close()
    assert abandoned.state is TrialState.FAIL
    assert "error" not in abandoned.user_attrs
    # taken up where it was, not from the start: the run has been begun twice and has every step once
    run = RunFolder(options.folder / abandoned.user_attrs["point"])
    assert len(run.environment()["resumed"]) == 1
    steps = [record["step"] for record in run.metrics("step")]
    assert steps == list(range(1, len(steps) + 1))


def test_crew_replaces_a_worker_that_was_killed(tmp_path: Path, study: str) -> None:
    options = small_sweep(tmp_path, str(tmp_path / "sweep.db"), study)
    killed: list[int] = []

    def kill_one(entries: Sequence[Entry]) -> None:
        if not killed and any(entry.standing is not Standing.OPEN for entry in entries):
            pid = multiprocessing.active_children()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    entries = run_sweep(options, workers=2, watch=kill_one)
    assert killed
    assert {entry.standing for entry in entries} == {Standing.DONE}
    assert completed(options) == Counter(point.key for point in options.points())
    assert len(find_runs([options.folder])) == len(entries)


class Thing:
    pass


def worker_that_is_told_to_stop(options: SweepOptions, swallowed: bool, went_on: Path) -> None:
    """SIGTERM arrives at the third step of its first run, if need be where nothing can be raised."""

    def train(folder: RunFolder, *, listen: Callable[[Record], None], **setup: Any) -> Record:
        def interrupted(record: Record) -> None:
            if record["kind"] == "step" and record["step"] == 3:
                thing = Thing()
                callback = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
                if swallowed:
                    del thing
                else:
                    signal.raise_signal(signal.SIGTERM)
                assert callback() is None
                went_on.touch()
            listen(record)

        return training.train(folder, listen=interrupted, **setup)

    launch.train = train
    launch._worker_process(options, 1)


@pytest.mark.parametrize("swallowed", [False, True])
def test_a_worker_that_is_told_to_stop_gives_back_its_trial(tmp_path: Path, study: str, swallowed: bool) -> None:
    """Also where SIGTERM arrives in a callback from which Python lets no exception out."""
    options, went_on = small_sweep(tmp_path, str(tmp_path / "sweep.db"), study), tmp_path / "went-on"
    worker = multiprocessing.get_context("spawn").Process(
        target=worker_that_is_told_to_stop, args=(options, swallowed, went_on)
    )
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert went_on.exists() == swallowed
    board = options.board()
    standings = {entry.standing for entry in board.survey(options.points())}
    board.close()
    assert standings == {Standing.OPEN}


def test_a_worker_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PATIENCE", 0.1)
    crew = launch._Crew(small_sweep(tmp_path, "x.db", "x"), 1)
    ready = tmp_path / "ready"
    process = multiprocessing.get_context("spawn").Process(target=deaf, args=(ready,))
    process.start()
    wait_for(ready.exists)
    crew._processes = [process]
    process.terminate()
    crew._wait()
    assert process.exitcode == -signal.SIGKILL


def deaf(ready: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.touch()
    time.sleep(600)


def test_stop_and_resume(tmp_path: Path, storage: str, study: str) -> None:
    board, begun = Board(storage, study, PATIENT), []

    def interrupted(run: RunFolder) -> Record:
        begun.append(run.name)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return pretend(run)

    with pytest.raises(KeyboardInterrupt):
        work(board, POINTS, tmp_path, interrupted, pulse=PATIENT)
    assert [e.standing.value for e in board.survey(POINTS)] == ["done", "open", "open", "open"]
    work(board, POINTS, tmp_path, interrupted, pulse=PATIENT)
    assert Counter(begun) == {p.key: 1 + (i == 1) for i, p in enumerate(POINTS)}
    work(board, POINTS, tmp_path, interrupted, pulse=PATIENT)
    assert len(begun) == 5
    board.close()


def test_failed_trials_keep_their_error_and_the_others_go_on(tmp_path: Path, study: str) -> None:
    board = Board(str(tmp_path / "sweep.db"), study, PATIENT)

    def fails_once(run: RunFolder) -> Record:
        if run.name == POINTS[1].key:
            raise ValueError("too wide")
        return pretend(run)

    work(board, POINTS, tmp_path, fails_once, pulse=PATIENT)
    entries = board.survey(POINTS)
    assert [e.standing.value for e in entries] == ["done", "failed", "done", "done"]
    assert entries[1].error == "ValueError: too wide"
    assert entries[1].trial is not None
    assert "fails_once" in entries[1].trial.user_attrs["traceback"]
    board.close()


def test_signs_of_life_keep_a_long_trial(tmp_path: Path, study: str) -> None:
    board = Board(str(tmp_path / "sweep.db"), study, PULSE)
    others: list[object] = []

    def slow(run: RunFolder) -> Record:
        time.sleep(PULSE.grace + 1.5)
        others.append(board.claim(POINTS[:1]))
        return pretend(run)

    work(board, POINTS[:1], tmp_path, slow, pulse=PULSE)
    assert others == [None]
    assert [e.standing for e in board.survey(POINTS[:1])] == [Standing.DONE]
    board.close()


def test_database_that_is_restarted_during_a_trial(tmp_path: Path, postgresql: Server, study: str) -> None:
    board = Board(postgresql.url, study, PATIENT)
    starter = threading.Timer(1.0, postgresql.start)

    def unplug(run: RunFolder) -> Record:
        postgresql.stop()
        starter.start()
        return pretend(run)

    work(board, POINTS[:1], tmp_path, unplug, pulse=PATIENT)
    starter.join()
    assert [t.state for t in board.trials()] == [TrialState.COMPLETE]
    board.close()


def test_workers_must_be_some(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        run_sweep(small_sweep(tmp_path, "x.db", "x"), workers=0)

"""Claims: every point is handed out once, whatever happens to the one who holds it."""

import threading
import time
from collections.abc import Iterator

import pytest
from optuna.trial import TrialState
from tests.lab.sweep.recipes import PATIENT, TABLE, small_recipe

from ocnopt.lab.sweep import Board, Standing, points_of
from ocnopt.lab.sweep.board import ATTEMPTS
from ocnopt.lab.sweep.storage import Pulse

POINTS = points_of(small_recipe(), grids=["plain"])
NOTES = {"test_accuracy": 0.5, "train_loss": 1.0, "seconds": 1.0, "diverged": False}


@pytest.fixture
def board(storage: str, study: str) -> Iterator[Board]:
    board = Board(storage, study, PATIENT)
    yield board
    board.close()


def standings(board: Board) -> list[str]:
    return [entry.standing.value for entry in board.survey(POINTS)]


def test_points_are_handed_out_in_order_and_once(board: Board) -> None:
    claims = [board.claim(POINTS) for _ in POINTS]
    assert [c.point for c in claims if c] == POINTS
    assert board.claim(POINTS) is None
    assert standings(board) == ["running"] * len(POINTS)


def test_many_at_a_time_get_different_points(storage: str, study: str) -> None:
    points, boards = points_of(small_recipe()), [Board(storage, study, PATIENT) for _ in range(4)]
    start, claimed = threading.Barrier(len(boards)), []

    def grab(board: Board) -> None:
        start.wait()
        while (claim := board.claim(points)) is not None:
            claimed.append(claim.point.key)
        board.close()

    threads = [threading.Thread(target=grab, args=(board,)) for board in boards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == sorted(point.key for point in points)


def test_a_point_that_is_done_stays_done(board: Board) -> None:
    claim = board.claim(POINTS)
    assert claim is not None
    assert board.complete(claim, 0.9, NOTES)
    (entry, *_) = board.survey(POINTS)
    assert entry.standing is Standing.DONE
    assert entry.trial is not None
    assert entry.trial.value == 0.9
    assert entry.trial.params == {"plain.lr": 0.01, "plain.feedback": "linear", "plain.seed": 0.0}
    assert entry.trial.user_attrs["config"] == POINTS[0].config.table()
    assert board.claim(POINTS[:1]) is None


def test_a_failure_is_kept_and_not_repeated_until_asked(board: Board) -> None:
    claim = board.claim(POINTS[:1])
    assert claim is not None
    board.fail(claim, "ValueError: no", "Traceback …")
    (entry, *_) = board.survey(POINTS)
    assert (entry.standing, entry.error) == (Standing.FAILED, "ValueError: no")
    assert board.claim(POINTS[:1]) is None
    board.forget_errors()
    assert board.claim(POINTS[:1]) is not None
    assert board.trials()[0].user_attrs["traceback"] == "Traceback …"


def test_a_point_that_was_given_back_is_open_at_once_any_number_of_times(board: Board) -> None:
    for _ in range(ATTEMPTS + 1):
        claim = board.claim(POINTS[:1])
        assert claim is not None
        assert board.release(claim)


def test_silence_opens_a_point_and_a_late_result_does_not_count(storage: str, study: str) -> None:
    board = Board(storage, study, Pulse(interval=1, grace=2))
    silent = board.claim(POINTS[:1])
    assert silent is not None
    time.sleep(3.1)  # the database counts whole seconds
    second = board.claim(POINTS[:1])
    assert second is not None
    assert second.trial_id != silent.trial_id
    assert not board.complete(silent, 0.1, NOTES)
    assert board.complete(second, 0.2, NOTES)
    assert [t.value for t in board.trials() if t.state is TrialState.COMPLETE] == [0.2]
    board.close()


def test_a_worker_that_died_while_claiming(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(trial_id: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(board, "show_life", die)
        with pytest.raises(KeyboardInterrupt):
            board.claim(POINTS[:1])
    assert [t.state for t in board.trials()] == [TrialState.WAITING]
    assert board.claim(POINTS[:1]) is not None
    assert [t.state for t in board.trials()] == [TrialState.RUNNING]


def test_what_kills_its_workers_is_given_up(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board._storage, "grace_period", -10)  # everybody is dead at once
    for _ in range(ATTEMPTS):
        assert board.claim(POINTS[:1]) is not None
    assert board.claim(POINTS[:1]) is None
    (entry, *_) = board.survey(POINTS)
    assert entry.standing is Standing.FAILED
    assert entry.error == f"given up: {ATTEMPTS} workers died while they ran it"


def test_a_recipe_may_grow_but_not_change_its_words(board: Board) -> None:
    assert board.claim(POINTS) is not None
    more_rates = {"plain": {**TABLE["grids"]["plain"], "lr": [0.01, 0.1, 1.0]}}
    grown = points_of(small_recipe(grids=more_rates, paper={}))
    assert [e.standing.value for e in board.survey(grown)].count("open") == 5
    assert board.claim(grown) is not None
    other_words = {"plain": {**TABLE["grids"]["plain"], "feedback": ["nonlinear"]}}
    with pytest.raises(ValueError, match="was begun with other choices, name another one"):
        board.claim(points_of(small_recipe(grids=other_words, paper={})))

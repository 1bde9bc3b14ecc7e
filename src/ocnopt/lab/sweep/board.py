"""Who runs which point: claims on the trials of an Optuna study.

Only one worker at a time looks at the board and claims (:func:`ocnopt.lab.sweep.storage.turn`), so no point is handed
out twice. A trial is written as *waiting*, gets its first sign of life, and is *running* only then: whatever moment a
worker is killed at, its trial either shows no more signs of life, or is still waiting and is taken up as it is.

============  ======================================================================================
``COMPLETE``  the point is done
``RUNNING``   a worker is at it; without a sign of life for the grace period it becomes ``FAIL``
``WAITING``   a worker died while it claimed the point
``FAIL``      with an ``error``: the run failed, which is kept. Without: the worker died or was stopped
============  ======================================================================================
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.exceptions import ExperimentalWarning, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from ocnopt.lab.schema import Scalar
from ocnopt.lab.sweep.points import Point
from ocnopt.lab.sweep.storage import Pulse, open_storage, storage_url, turn

#: a point whose workers died so many times is given up: it may be what kills them
ATTEMPTS = 3

_RETRIED = "errors_forgotten_through"


class Standing(Enum):
    """What there is to do about a point."""

    OPEN = "open"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Claim:
    """A point that this worker has to run, as a trial of the study."""

    point: Point
    trial_id: int
    number: int


@dataclass(frozen=True)
class Entry:
    """One point on the board; ``trial`` is the one that decided its standing, if there is any."""

    point: Point
    standing: Standing
    trial: FrozenTrial | None
    error: str | None = None


class Board:
    """The trials of one study.

    Args:
        storage: the path of a SQLite file, or the URL of a PostgreSQL database.
        study: its name there.
        pulse: how workers show that they are alive; the same for all workers of a study.
    """

    def __init__(self, storage: str, study: str, pulse: Pulse | None = None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.url, self.study_name = storage_url(storage), study
        with turn(self.url, study):
            self._storage = open_storage(self.url, pulse or Pulse())
            self._study = optuna.create_study(
                study_name=study, storage=self._storage, direction="maximize", load_if_exists=True
            )
        self._study_id = self._storage.get_study_id_from_name(study)

    def close(self) -> None:
        self._storage.engine.dispose()

    # --- looking ---

    def survey(self, points: Sequence[Point]) -> list[Entry]:
        """How things stand. Trials of points that are no longer in the grid are left out."""
        trials: dict[str, list[FrozenTrial]] = {}
        for trial in self._storage.get_all_trials(self._study_id, deepcopy=False):
            trials.setdefault(str(trial.user_attrs.get("point")), []).append(trial)
        forgotten = int(self._storage.get_study_user_attrs(self._study_id).get(_RETRIED, -1))
        return [_judge(point, trials.get(point.key, []), forgotten) for point in points]

    def trials(self) -> list[FrozenTrial]:
        """All trials of the study, also those that failed or were abandoned."""
        return self._storage.get_all_trials(self._study_id)

    # --- a worker's moves ---

    def claim(self, points: Sequence[Point]) -> Claim | None:
        """Take the next open point, or ``None`` where there is none at the moment."""
        with turn(self.url, self.study_name):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                optuna.storages.fail_stale_trials(self._study)
            entry = next((e for e in self.survey(points) if e.standing is Standing.OPEN), None)
            if entry is None:
                return None
            left_over = entry.trial is not None and entry.trial.state is TrialState.WAITING
            trial_id = entry.trial._trial_id if left_over and entry.trial else self._write(entry.point)
            self.show_life(trial_id)
            self._storage.set_trial_state_values(trial_id, TrialState.RUNNING)
        self._storage.set_trial_user_attr(trial_id, "worker", f"{socket.gethostname()}:{os.getpid()}")
        return Claim(entry.point, trial_id, self._storage.get_trial(trial_id).number)

    def show_life(self, trial_id: int) -> None:
        self._storage.record_heartbeat(trial_id)

    def complete(self, claim: Claim, value: float, notes: Mapping[str, Any]) -> bool:
        """``False``: the trial was given to somebody else in the meantime, and this result does not count."""
        return self._finish(claim, TrialState.COMPLETE, notes, value)

    def fail(self, claim: Claim, error: str, traceback: str) -> bool:
        """The run failed: keep why, and do not run it again unless asked to."""
        return self._finish(claim, TrialState.FAIL, {"error": error, "traceback": traceback})

    def release(self, claim: Claim) -> bool:
        """Stop in the middle: the point is open again at once."""
        return self._finish(claim, TrialState.FAIL, {"released": True})

    def forget_errors(self) -> None:
        """Open all points whose runs have failed so far; their trials stay on record."""
        last = max((trial.number for trial in self.trials()), default=-1)
        self._storage.set_study_user_attr(self._study_id, _RETRIED, last)

    # --- how it is written ---

    def _write(self, point: Point) -> int:
        trial = optuna.trial.create_trial(
            state=TrialState.WAITING,
            params={f"{point.grid.key}.{name}": _plain(value) for name, value in point.values.items()},
            distributions=_distributions(point),
            user_attrs={"point": point.key, "grid": point.grid.key, "config": point.config.table()},
        )
        try:
            return self._storage.create_new_trial(self._study_id, template_trial=trial)
        except ValueError as error:  # Optuna's own rule: the choices of a study that are not numbers stay the same
            raise ValueError(
                f"study {self.study_name!r} was begun with other choices, name another one: {error}"
            ) from None

    def _finish(self, claim: Claim, state: TrialState, notes: Mapping[str, Any], value: float | None = None) -> bool:
        try:
            for key, note in notes.items():
                self._storage.set_trial_user_attr(claim.trial_id, key, note)
            return self._storage.set_trial_state_values(claim.trial_id, state, None if value is None else [value])
        except UpdateFinishedTrialError:
            return False


def settled(entries: Iterable[Entry]) -> bool:
    """Whether nothing is left to do, nor may become so again."""
    return all(entry.standing in (Standing.DONE, Standing.FAILED) for entry in entries)


def _judge(point: Point, trials: Sequence[FrozenTrial], forgotten: int) -> Entry:
    by_state: dict[TrialState, FrozenTrial] = {trial.state: trial for trial in trials}  # the latest of each
    for state, standing in (
        (TrialState.COMPLETE, Standing.DONE),
        (TrialState.RUNNING, Standing.RUNNING),
        (TrialState.WAITING, Standing.OPEN),
    ):
        if state in by_state:
            return Entry(point, standing, by_state[state])
    counted = [trial for trial in trials if trial.number > forgotten]
    for trial in counted:
        if "error" in trial.user_attrs:
            return Entry(point, Standing.FAILED, trial, trial.user_attrs["error"])
    deaths = [trial for trial in counted if "released" not in trial.user_attrs]
    if len(deaths) >= ATTEMPTS:
        return Entry(point, Standing.FAILED, deaths[-1], f"given up: {len(deaths)} workers died while they ran it")
    return Entry(point, Standing.OPEN, deaths[-1] if deaths else None)


def _distributions(point: Point) -> dict[str, BaseDistribution]:
    """The range of each option in its grid: Optuna wants one for every value it is told."""
    ranges = {name: _distribution(choices) for name, choices in point.grid.choices.items()}
    ranges["seed"] = FloatDistribution(0, 2**63)
    return {f"{point.grid.key}.{name}": distribution for name, distribution in ranges.items()}


def _distribution(values: Sequence[Scalar]) -> BaseDistribution:
    if all(_is_number(value) for value in values):
        return FloatDistribution(min(map(float, values)), max(map(float, values)))
    return CategoricalDistribution(list(dict.fromkeys(values)))


def _plain(value: Scalar) -> Scalar:
    return float(value) if _is_number(value) else value


def _is_number(value: Scalar) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

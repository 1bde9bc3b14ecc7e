"""The data flow of every forward pass of a model, as its hooks see it go by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ocnopt.anatomy import Anatomy
from ocnopt.apart import is_at_work
from ocnopt.games.cues import Attendance, Cues
from ocnopt.games.edges import Edges
from ocnopt.games.expected import Read
from ocnopt.games.flow import Flow, is_due
from ocnopt.games.recorder import Recorder, is_innermost
from ocnopt.games.settled import Settled
from ocnopt.rng import RNGState

if TYPE_CHECKING:
    from ocnopt.records import Pass


#: of so many kinds of input it is remembered what the model does with them
_HABITS = 16


@dataclass
class Habit:
    """What the model did the last times that it was given the like."""

    flow: Flow
    times: int = 0
    settled: Settled | None = None  # how the model was set when it last did that
    cues: Cues | None = None  # of a pass that is certain to do it again

    def expected(self) -> Flow | None:
        """What the next pass is likely to do."""
        return self.flow if self.times > 1 and self.flow.unknown is None else None

    def watched(self) -> Edges | None:
        """What it is to be watched for, if nobody wants to see more."""
        foreseen = self.expected() is not None and self.flow.fixed is None and not is_due(self.flow)
        return self.flow.watched if foreseen else None


class Follower:
    """Between :meth:`begin` and :meth:`end` everything is recorded; the flows of the last passes are remembered."""

    def __init__(self, players: Mapping[str, nn.Module]) -> None:
        """``players``: whose insides nobody looks at. None: then nothing is certain."""
        self._players = players
        self._flows: list[Flow] = []
        self._habits: dict[Any, Habit] = {}  # by what the model is given
        self.recorder: Recorder | None = None  # is told where players begin and end
        self.attendance: Attendance | None = None  # of a pass that is certain, likewise
        self._settled: Settled | None = None  # how the model was set when the pass began
        self._anatomy: Anatomy | None = None
        self._open: Anatomy | None = None  # of a model that may choose what it does
        self._random: RNGState | None = None
        self._draws = True  # does the model draw random numbers? Until the first pass is over it may

    def certain(self, given: Any, anatomy: Anatomy) -> Cues | None:
        """Of a pass that is certain to do what the last ones did: the model is set as it was, runs under what it ran
        under, draws nothing, and its code leaves it no choice.
        """
        habit = self._habits.get(given)
        if habit is None or habit.settled is None or self._draws or is_at_work():
            return None
        flow, watched = habit.expected(), habit.watched()
        if flow is None or (flow.asking is None if watched is None else flow.asks):
            return None
        if not habit.settled.holds(anatomy):
            return None
        if habit.cues is None or not habit.cues.fit(flow, watched):
            habit.cues = Cues(flow, watched, self._players)
        return habit.cues

    def attend(self, cues: Cues, read: Read) -> None:
        """Such a pass begins."""
        self._abandon()
        self.attendance = Attendance(cues, read)

    def begin(
        self, model: nn.Module, anatomy: Anatomy, inputs: list[Tensor], given: Any, rng: RNGState, read: Read
    ) -> Edges | None:
        """What is to be watched of the pass, if it can be foreseen what it is going to do; ``read`` is told of it.

        ``given``: what passes have in common that are likely to do the same; ``rng``: the present random numbers.
        """
        self._abandon()
        habit, self._random = self._habits.get(given), rng
        expected, watched = (None, None) if habit is None else (habit.expected(), habit.watched())
        device = anatomy.parameters[0].device.type if anatomy.parameters else "cpu"
        self._anatomy, self._settled = anatomy, None
        if expected is not None and anatomy is not self._open and not self._draws and self._players:
            self._settled = Settled.of(anatomy, device, self._players.values())
            self._open = anatomy if self._settled is None else None
        self.recorder = Recorder(model, inputs, device, rng.states if self._draws else None, expected, watched, read)
        self.recorder.__enter__()  # type: ignore[no-untyped-call]
        return watched

    def clear(self) -> None:
        """Between passes nothing is recorded."""
        self._abandon()

    @property
    def draws(self) -> bool:
        """Did the last pass draw random numbers?"""
        return self._draws

    @property
    def follows(self) -> Flow | None:
        """What the pass under way is expected to do, if it has done nothing else so far."""
        if self.attendance is not None:
            return self.attendance.cues.flow
        return None if self.recorder is None else self.recorder.follows

    def end(self, output: Any, this: Pass | None) -> Flow | None:
        if self.attendance is not None:
            return self._end(output, this)
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            return None
        recorder.__exit__(None, None, None)
        if this is None or self._random is None:
            return None
        flow, this.draws = recorder.finish(output, self._flows), recorder.draws
        if recorder.follows is flow and (habit := self._habits.get(this.given)) is not None:
            self._settle(habit)
        flow.held.add(this)
        self._flows = [flow, *(other for other in self._flows[:7] if other is not flow)]  # the likeliest first
        drew = not self._random.same_as(RNGState.capture(self._random.states))
        if drew and not self._draws:
            this.fixed = "it drew random numbers that were not kept (from the next step on they are)"
        self._draws = drew
        return flow

    def _end(self, output: Any, this: Pass | None) -> Flow | None:
        """Of a pass that was certain."""
        assert self.attendance is not None
        attendance, self.attendance = self.attendance, None
        complete = attendance.end()
        if output is None or this is None:
            return None
        flow = attendance.cues.flow
        if not complete:  # that it was certain was wrong
            self._open = self._anatomy
            self._habits.clear()
            return None
        flow.held.add(this)
        return flow

    def _settle(self, habit: Habit) -> None:
        """It was known what a pass would do, and that is what it did."""
        habit.settled = self._settled
        if self._settled is not None and not self._settled.tells(habit.flow):
            habit.settled, self._open = None, self._anatomy

    def look_again(self) -> None:
        """Other parameters are trained: what was a chain may be none."""
        for flow in (*self._flows, *(habit.flow for habit in self._habits.values())):
            flow.asking = None

    def learn(self, given: Any, flow: Flow) -> None:
        """A pass is trained on."""
        habit = self._habits.pop(given, None)
        if habit is None or habit.flow is not flow:
            habit = Habit(flow)
        habit.times += 1
        self._habits[given] = habit
        if len(self._habits) > _HABITS:
            del self._habits[next(iter(self._habits))]  # the one that was not seen for longest

    def _abandon(self) -> None:
        """A pass that was interrupted (Ctrl-C), or that calls the model itself, is over without having ended."""
        if self.attendance is not None:
            self.attendance.end()
        recorder, self.recorder, self.attendance = self.recorder, None, None
        if recorder is None:
            return
        recorder.unknown = "the pass was interrupted"
        if is_innermost(recorder):
            recorder.__exit__(None, None, None)

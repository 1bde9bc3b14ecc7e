"""One step of the game: solve backward, act forward, report."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence, Set
from itertools import islice
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ocnopt import rollout
from ocnopt.actor import Answer, bounded
from ocnopt.bellman import Consistent, Policy
from ocnopt.capture import Tape
from ocnopt.diagnostics import Diagnostics
from ocnopt.distributed import World
from ocnopt.games.live import Live, roll_out
from ocnopt.groups import Samples
from ocnopt.linalg import without_autocast
from ocnopt.phases import BELLMAN, ROLLOUT
from ocnopt.players import Player
from ocnopt.problem import Kernels, Problem
from ocnopt.records import Pass
from ocnopt.rollout import Measure
from ocnopt.shards import local
from ocnopt.stages import Stages
from ocnopt.stock import Stock


def play(
    problem: Problem,
    group: Mapping[str, Any],
    tape: Tape | None,
    passes: Sequence[Pass],
    samples: Samples,
    live: Sequence[Live],
    world: World,
) -> Diagnostics:
    """Update all parameters and say what was done. ``live``: the state of the game, where its data flow is known;
    ``world``: the processes that share the batch, each of which measures a part of the state.
    """
    if group["feedback"] == "off":
        return _descend(problem)
    policy, kernels = problem.solve(group["bellman"], group["gauss_newton"], group["game"] == "cooperative")
    answers = Answers(policy, group["clamp"], problem.stages)
    predicted, sign = None, -1.0 if group["maximize"] else 1.0
    if group["feedback"] == "linear":
        _linear(problem, kernels, answers)
    else:
        assert tape is not None
        measures = [Measure(samples.of(this), problem.fractions, sign, this.scale) for this in passes]
        predicted = _nonlinear(problem, kernels, answers, tape, passes, live, measures, world)
    return Diagnostics(
        names=problem.stages.names,
        stage_of=problem.stages.stage_of,
        policy=policy,
        kernels=kernels,
        answers=answers,
        measured=group["feedback"] == "nonlinear",
        measured_change=predicted,
        sign=sign,
        failed_refreshes=problem.failed_refreshes,
    )


def _descend(problem: Problem) -> Diagnostics:
    """No game: w = 1, the optimizer that the curvature belongs to."""
    for actor in problem.actors:
        actor.measure(None)
    problem.act(Answer(torch.ones_like(problem.fractions), clamp=False))
    return Diagnostics(failed_refreshes=problem.failed_refreshes)


class Answers:
    """Asks the policy and remembers its answers: ``[N, r]`` of each kind."""

    def __init__(self, policy: Policy, clamp: bool, stages: Stages) -> None:
        self.policy, self.clamp, self.stages = policy, clamp, stages
        self._kept: dict[int, tuple[Answer, Tensor]] = {}
        self._all: Answer | None = None

    @BELLMAN
    def ask(self, k: int, s: Tensor) -> list[tuple[list[int], Answer]]:
        """For the seats of a stage: one answer where they cooperate."""
        seats = self.stages.seats[k]
        found = []
        for theirs in [seats] if self._one_answer else [[seat] for seat in seats]:
            answer = self._answer(theirs[0], s)
            self._kept |= dict.fromkeys(theirs, (answer, s))
            found.append((theirs, answer))
        return found

    def _answer(self, seat: int, s: Tensor) -> Answer:
        if isinstance(self.policy, Consistent):
            start, slope = self.policy.line(seat)
            return Answer(start, self.clamp, slope, s)
        return Answer(self.policy.weights(seat, s), self.clamp)

    def of(self, seat: int) -> Answer:
        """One that was given."""
        return self._kept[seat][0]

    @property
    def _one_answer(self) -> bool:
        return not isinstance(self.policy, Consistent) or self.policy.cooperative

    @BELLMAN
    def ask_once(self) -> Answer | None:
        """The linear rollout of consistent mode: one answer for all stages, if all players cooperate."""
        if not isinstance(self.policy, Consistent) or not self.policy.cooperative:
            return None
        self._all = Answer(self.policy.whole_network(), self.clamp)
        return self._all

    # what follows is for whoever asks: nothing is kept, since a graph overwrites the numbers when it is replayed

    @property
    def asked(self) -> Tensor:
        if self._all is not None:
            return self._all.start.expand(len(self.stages.stage_of), -1)
        return self._column([answer.worked_out() for answer, _ in self._kept.values()])

    @property
    def w(self) -> Tensor:
        return bounded(self.asked, self.clamp)

    @property
    def s(self) -> Tensor | None:
        """As each seat saw it, if the policy was asked stage by stage."""
        return self._column([s for _, s in self._kept.values()]) if self._kept else None

    def _column(self, rows: Sequence[Tensor]) -> Tensor:
        by_seat = dict(zip(self._kept, rows, strict=True))
        return torch.stack([by_seat[seat] for seat in range(len(rows))])


@ROLLOUT
def _linear(problem: Problem, kernels: Kernels, answers: Answers) -> None:
    answer = answers.ask_once()
    if answer is not None:
        problem.act(answer)
        return
    problem.coast()
    s, (K, u) = torch.zeros_like(problem.fractions), kernels.plan
    for k in range(problem.stages.count):
        for seats, answer in answers.ask(k, s):
            problem.steer(seats, answer)
            # a list of indices would have to be copied to the device
            here, cost = torch.stack([K[i] for i in seats]).sum(0), torch.stack([u[i] for i in seats]).sum(0)
            s = s - here @ answer.w - cost
    problem.settle()


@ROLLOUT
def _nonlinear(
    problem: Problem,
    kernels: Kernels,
    answers: Answers,
    tape: Tape,
    passes: Sequence[Pass],
    live: Sequence[Live],
    measures: Sequence[Measure],
    world: World,
) -> Tensor | None:
    problem.coast()

    @torch.no_grad()  # both are called from inside the model's second pass, which may turn gradients on
    @without_autocast()
    def act(k: int, s: Tensor) -> None:
        s = world.total(s.detach() if s.requires_grad else s)
        for seats, answer in answers.ask(k, s):
            problem.steer(seats, answer)

    @torch.no_grad()
    @without_autocast()
    def predict(seat: int) -> Tensor:
        K, u = kernels.taken
        return -(K[seat] @ answers.of(seat).w + u[seat]) / world.size  # everybody says the same

    if live:
        change = roll_out(live, problem.stages, act, predict, measures)
    else:
        (this,), (measure,) = passes, measures
        follower = rollout.InOrder(this, tape.records, problem.stages, act, predict, measure)
        change = rollout.in_order(tape, this, follower)
    problem.settle()
    everywhere = world.every(change is not None)
    return world.total(change) if everywhere and change is not None else None


class Snapshot:
    """Puts parameters and state back as they were if the block raises: a second forward pass may fail in the middle."""

    def __init__(self, players: Sequence[Player], state: MutableMapping[Tensor, dict[str, Any]], stock: Stock) -> None:
        """``stock``: memory for copies."""
        self.players, self.state, self._stock = players, state, stock
        self.params = [p for player in players for p in player.params]
        self.changing: list[Tensor] = []
        self.copies: list[Tensor] = []

    def __enter__(self) -> Snapshot:
        self.states = [dict(self.state[p]) for p in self.params]
        return self

    def take(self, but: Set[str]) -> None:
        """From here on numbers change; ``but``: state of which it is known that it does not before all is well."""
        self.changing, states = list(map(local, self.params)), iter(self.states)
        for player in self.players:
            still = but | player.untouched(self.state)
            for own in islice(states, len(player.params)):
                found = [v for key, v in own.items() if isinstance(v, Tensor) and key not in still]
                self.changing += map(local, found)
        self.copies = self._stock.copied(self.changing)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            return
        if self.copies:
            torch._foreach_copy_(self.changing, self.copies)
        for p, before in zip(self.params, self.states, strict=True):
            self.state[p].clear()
            self.state[p].update(before)

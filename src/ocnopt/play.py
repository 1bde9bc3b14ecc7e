"""One step of the game: solve backward, act forward, report."""

from __future__ import annotations

from collections.abc import Container, Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ocnopt import rollout
from ocnopt.bellman import Consistent, Policy
from ocnopt.capture import Tape
from ocnopt.diagnostics import Diagnostics
from ocnopt.distributed import World
from ocnopt.games.live import Live, roll_out
from ocnopt.groups import Samples
from ocnopt.linalg import without_autocast
from ocnopt.multi import copied
from ocnopt.phases import BELLMAN, ROLLOUT
from ocnopt.players import Player
from ocnopt.problem import Kernels, Problem
from ocnopt.records import Pass
from ocnopt.rollout import Measure
from ocnopt.stages import Stages


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
        asked=answers.asked,
        w=answers.w,
        measured_s=answers.s if group["feedback"] == "nonlinear" else None,
        measured_change=predicted,
        sign=sign,
        failed_refreshes=problem.failed_refreshes,
    )


def _descend(problem: Problem) -> Diagnostics:
    """No game: w = 1, the optimizer that the curvature belongs to."""
    for bucket in problem.buckets:
        bucket.measure(None)
    problem.act(torch.ones_like(problem.fractions))
    return Diagnostics(failed_refreshes=problem.failed_refreshes)


class Answers:
    """Asks the policy, keeps its answers in bounds and remembers them: ``[N, r]`` each."""

    def __init__(self, policy: Policy, clamp: bool, stages: Stages) -> None:
        self.policy, self.clamp, self.stages = policy, clamp, stages
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._all: tuple[Tensor, Tensor] | None = None

    @BELLMAN
    def ask(self, k: int, s: Tensor) -> list[tuple[list[int], Tensor]]:
        """The weights of the seats of a stage: one answer where they cooperate."""
        seats = self.stages.seats[k]
        together = [seats] if self._one_answer else [[seat] for seat in seats]
        for theirs in together:
            asked = self.policy.weights(theirs[0], s)
            self._kept |= dict.fromkeys(theirs, (asked, self._bounded(asked), s))
        return [(theirs, self._kept[theirs[0]][1]) for theirs in together]

    @property
    def _one_answer(self) -> bool:
        return not isinstance(self.policy, Consistent) or self.policy.cooperative

    @BELLMAN
    def ask_once(self) -> Tensor | None:
        """The linear rollout of consistent mode: one w for all stages, if all players cooperate."""
        if not isinstance(self.policy, Consistent) or not self.policy.cooperative:
            return None
        asked, count = self.policy.whole_network(), len(self.stages.stage_of)
        bounded = self._bounded(asked)
        self._all = asked.expand(count, -1), bounded.expand(count, -1)
        return bounded

    def _bounded(self, w: Tensor) -> Tensor:
        w = torch.nan_to_num(w, 0.0, 0.0, 0.0)  # a kernel beyond all numbers: do not move
        return w.clamp(0, 1) if self.clamp else w

    @property
    def asked(self) -> Tensor:
        return self._column(0) if self._all is None else self._all[0]

    @property
    def w(self) -> Tensor:
        return self._column(1) if self._all is None else self._all[1]

    @property
    def s(self) -> Tensor:
        return self._column(2)

    def _column(self, i: int) -> Tensor:
        return torch.stack([self._kept[seat][i] for seat in range(len(self.stages.stage_of))])


@ROLLOUT
def _linear(problem: Problem, kernels: Kernels, answers: Answers) -> None:
    w = answers.ask_once()
    if w is not None:
        problem.act(w)
        return
    problem.coast()
    s, (K, u) = torch.zeros_like(problem.fractions), kernels.plan
    for k in range(problem.stages.count):
        for seats, w in answers.ask(k, s):
            problem.steer(seats, w)
            # a list of indices would have to be copied to the device
            s = s - torch.stack([K[i] for i in seats]).sum(0) @ w - torch.stack([u[i] for i in seats]).sum(0)
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
    weights: dict[int, Tensor] = {}
    problem.coast()

    @torch.no_grad()  # both are called from inside the model's second pass, which may turn gradients on
    @without_autocast()
    def act(k: int, s: Tensor) -> None:
        s = world.total(s)
        for seats, w in answers.ask(k, s):
            problem.steer(seats, w)
            weights.update(dict.fromkeys(seats, w))

    @torch.no_grad()
    @without_autocast()
    def predict(seat: int) -> Tensor:
        K, u = kernels.taken
        return -(K[seat] @ weights[seat] + u[seat]) / world.size  # everybody says the same

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

    def __init__(
        self, players: Sequence[Player], state: MutableMapping[Tensor, dict[str, Any]], but: Container[str] = ()
    ) -> None:
        """``but``: state of which it is known that it does not change before all is well."""
        self.params = [p for player in players for p in player.params]
        self.state, self.but = state, but

    def __enter__(self) -> None:
        self.states = [dict(self.state[p]) for p in self.params]
        tensors = [(own, k, v) for own in self.states for k, v in own.items() if isinstance(v, Tensor)]
        kept = [(own, k, v) for own, k, v in tensors if k not in self.but]
        copies = copied([*self.params, *(v for _, _, v in kept)])
        self.values = copies[: len(self.params)]
        for (own, key, _), copy in zip(kept, copies[len(self.params) :], strict=True):
            own[key] = copy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            return
        torch._foreach_copy_(self.params, self.values)
        for p, before in zip(self.params, self.states, strict=True):
            self.state[p].clear()
            self.state[p].update(before)

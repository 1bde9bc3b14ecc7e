"""One step of the game: solve backward, act forward, report."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ocnopt import rollout
from ocnopt.bellman import Consistent, Policy
from ocnopt.capture import Pass, Tape
from ocnopt.diagnostics import Diagnostics
from ocnopt.linalg import without_autocast
from ocnopt.players import Player
from ocnopt.problem import Kernels, Problem
from ocnopt.stages import Stages


def play(
    problem: Problem, stages: Stages, group: Mapping[str, Any], tape: Tape | None, this: Pass | None
) -> Diagnostics:
    """Update all parameters and say what was done."""
    if group["feedback"] == "off":
        return _descend(problem)
    policy, kernels = problem.solve(group["bellman"], group["gauss_newton"])
    answers = Answers(policy, group["clamp"], problem.count)
    predicted, sign = None, -1.0 if group["maximize"] else 1.0
    if group["feedback"] == "linear":
        _linear(problem, kernels, answers)
    else:
        assert tape is not None
        assert this is not None
        predicted = _nonlinear(problem, kernels, answers, stages, tape, this, sign)
    return Diagnostics(
        names=stages.names,
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
        bucket.metric = bucket.curvature.measure(bucket, None)
    problem.act(None, torch.ones_like(problem.fractions))
    return Diagnostics(failed_refreshes=problem.failed_refreshes)


class Answers:
    """Asks the policy, keeps its answers in bounds and remembers them: ``[S, r]`` each."""

    def __init__(self, policy: Policy, clamp: bool, count: int) -> None:
        self.policy, self.clamp, self.count = policy, clamp, count
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._all: tuple[Tensor, Tensor] | None = None

    def ask(self, k: int, s: Tensor) -> Tensor:
        asked = self.policy.weights(k, s)
        self._kept[k] = asked, self._bounded(asked), s
        return self._kept[k][1]

    def ask_once(self) -> Tensor:
        """The linear rollout of consistent mode: one w for all stages."""
        assert isinstance(self.policy, Consistent)
        asked = self.policy.whole_network()
        bounded = self._bounded(asked)
        self._all = asked.expand(self.count, -1), bounded.expand(self.count, -1)
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
        return torch.stack([self._kept[k][i] for k in range(self.count)])


def _linear(problem: Problem, kernels: Kernels, answers: Answers) -> None:
    if isinstance(answers.policy, Consistent):
        problem.act(None, answers.ask_once())
        return
    s, plan = torch.zeros_like(problem.fractions), kernels.plan
    for k in range(problem.count):
        w = answers.ask(k, s)
        problem.act(k, w)
        s = s - plan[0][k] @ w - plan[1][k]


def _nonlinear(
    problem: Problem, kernels: Kernels, answers: Answers, stages: Stages, tape: Tape, this: Pass, sign: float
) -> Tensor | None:
    taken = kernels.taken

    @without_autocast()  # both are called from inside the model's second pass
    def act(k: int, s: Tensor) -> Tensor:
        w = answers.ask(k, s)
        problem.act(k, w)
        return w

    @without_autocast()
    def predict(k: int, w: Tensor) -> Tensor:
        return -(taken[0][k] @ w + taken[1][k])

    signs = torch.full_like(problem.fractions, sign)
    follower = rollout.Nonlinear(this, tape.records, stages.of_module, act, predict, problem.groups, signs)
    follower.act_before_all(stages.uncalled)
    change = rollout.nonlinear(tape, this, follower)
    follower.act_at_last(range(problem.count))
    return change


class Snapshot:
    """Puts parameters and state back as they were if the block raises: a second forward pass may fail in the middle."""

    def __init__(self, players: Sequence[Player], state: MutableMapping[Tensor, dict[str, Any]]) -> None:
        self.params = [p for player in players for p in player.params]
        self.state = state

    def __enter__(self) -> None:
        self.values = [p.clone() for p in self.params]
        self.states = [{k: _kept(k, v) for k, v in self.state[p].items()} for p in self.params]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            return
        torch._foreach_copy_(self.params, self.values)
        for p, before in zip(self.params, self.states, strict=True):
            self.state[p].clear()
            self.state[p].update(before)


def _kept(key: str, value: Any) -> Any:
    # clocks tick after the step, so they need no copy, and they are shared between parameters
    return value.clone() if isinstance(value, Tensor) and key != "step" else value

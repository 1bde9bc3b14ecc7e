"""Alignment: at which of its possible stages a branch acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ocnopt.games.bandit import Bandit, EXP3PlusPlus
from ocnopt.games.schedule import Branch, Schedule

_NAMES = ("first", "last", "random", "adaptive")


@dataclass(frozen=True)
class Alignment:
    """One rule for a branch, or for all of them. As an argument its name, or the number, will do.

    >>> OCNOpt(..., alignment="last")
    >>> OCNOpt(..., alignment={"layer2": 1, "layer3": Alignment.adaptive(reward=validation_accuracy)})
    """

    rule: str | int
    reward: Callable[[], float] | None = field(default=None, compare=False)
    every: int = 1
    bandit: Callable[[int], Bandit] = field(default=EXP3PlusPlus, compare=False)

    @classmethod
    def adaptive(
        cls,
        reward: Callable[[], float] | None = None,
        *,
        every: int = 1,
        bandit: Callable[[int], Bandit] = EXP3PlusPlus,
    ) -> Alignment:
        """A bandit chooses, and stays with its choice until it is told what that was worth.

        Args:
            reward: called after every ``every``-th step; returns a number in [0, 1], say a validation accuracy. Without
                it, call ``optimizer.game.reward(value)``.
            every: steps of one round.
            bandit: makes the bandit for a number of arms: EXP3++, unless you want another.
        """
        if reward is not None and not callable(reward):
            raise TypeError(f"reward must be a function without arguments, got {reward!r}")
        if every < 1:
            raise ValueError(f"every must be a whole number ≥ 1, got {every!r}")
        return cls("adaptive", reward, every, bandit)

    @classmethod
    def of(cls, value: Any) -> Alignment | None:
        """The rule that an argument means, or ``None`` if it means none."""
        if isinstance(value, Alignment):
            return value
        number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        return cls(value) if number or (isinstance(value, str) and value in _NAMES) else None


#: what the argument ``alignment`` may be
Rules = str | int | Alignment | Mapping[str, str | int | Alignment]


def rules_of(value: Any) -> dict[str, Alignment] | None:
    """By prefix of the names of branches; ``""`` is all of them. ``None`` if the argument is not valid."""
    given = value if isinstance(value, Mapping) else {"": value}
    rules = {prefix: Alignment.of(rule) for prefix, rule in given.items()}
    if not all(isinstance(prefix, str) and rule is not None for prefix, rule in rules.items()):
        return None
    return {prefix: rule for prefix, rule in rules.items() if rule is not None}


def plain(value: Any) -> Any:
    """As it goes into a checkpoint: names and numbers."""
    if isinstance(value, Mapping):
        return {prefix: plain(rule) for prefix, rule in value.items()}
    return value.rule if isinstance(value, Alignment) else value


class Aligner:
    """Chooses a placement for each step and remembers what its bandits have learned."""

    def __init__(self) -> None:
        self._generator: torch.Generator | None = None
        self._bandits: dict[str, Bandit] = {}
        self._choices: dict[str, int] = {}  # of the adaptive rules, until they get their reward
        self._loaded: dict[str, Any] = {}
        self._steps = 0

    def choose(self, rules: Mapping[str, Alignment], schedule: Schedule) -> dict[str, int]:
        """By how many stages each branch is late."""
        scopes = _scopes(rules, schedule.branches)
        late: dict[str, int] = {}
        for prefix, branches in scopes.items():
            if branches:
                delay = self._delay(prefix, rules[prefix], branches)
                late |= {branch.name: min(delay, branch.slack) for branch in branches}
        return late

    def _delay(self, prefix: str, rule: Alignment, branches: Sequence[Branch]) -> int:
        most = max(branch.slack for branch in branches)
        if isinstance(rule.rule, int):
            for branch in branches:
                if rule.rule > branch.slack:
                    raise ValueError(
                        f"alignment={rule.rule} is not possible for {branch.name!r}: it can be late by at most "
                        f"{branch.slack} (stages {branch.first} to {branch.first + branch.slack})"
                    )
            return rule.rule
        if rule.rule == "random":
            return int(torch.randint(most + 1, (), generator=self._random()))
        if rule.rule == "adaptive":
            return self._arm(prefix, rule, most + 1)
        return most if rule.rule == "last" else 0

    def _arm(self, prefix: str, rule: Alignment, arms: int) -> int:
        bandit = self._bandits.get(prefix)
        if bandit is None or bandit.arms != arms:
            bandit = self._bandits[prefix] = rule.bandit(arms)
            if prefix in self._loaded:
                bandit.load_state_dict(self._loaded.pop(prefix))
            else:
                self._choices.pop(prefix, None)
        if prefix not in self._choices:
            self._choices[prefix] = bandit.choose(self._random())
        return self._choices[prefix]

    def _random(self) -> torch.Generator:
        # of its own: choosing must not change the random numbers of the training loop
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(torch.initial_seed())
        return self._generator

    def reward(self, value: float) -> None:
        if not self._choices:
            raise RuntimeError("reward: no adaptive alignment has been played since the last reward")
        for prefix in self._choices:
            self._bandits[prefix].update(value)
        self._choices.clear()

    def after_step(self, rules: Mapping[str, Alignment]) -> None:
        """Ask for rewards that are due."""
        self._steps += 1
        for prefix, rule in rules.items():
            if rule.reward is not None and prefix in self._choices and self._steps % rule.every == 0:
                self._bandits[prefix].update(rule.reward())
                del self._choices[prefix]

    @property
    def bandits(self) -> dict[str, Bandit]:
        return dict(self._bandits)

    def state_dict(self) -> dict[str, Any]:
        if self._generator is None:
            return {}
        return {
            "generator": self._generator.get_state(),
            "bandits": {prefix: bandit.state_dict() for prefix, bandit in self._bandits.items()} | self._loaded,
            "choices": dict(self._choices),
            "steps": self._steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator, self._bandits, self._loaded, self._choices, self._steps = None, {}, {}, {}, 0
        if not state:
            return
        self._random().set_state(state["generator"].cpu())
        self._loaded = dict(state["bandits"])  # how many arms there are is known with the first pass
        self._choices, self._steps = dict(state["choices"]), state["steps"]


def _scopes(rules: Mapping[str, Alignment], branches: Sequence[Branch]) -> dict[str, list[Branch]]:
    """The branches that each rule is for: the longest prefix counts."""
    scopes: dict[str, list[Branch]] = {prefix: [] for prefix in rules}
    for branch in branches:
        fitting = [p for p in rules if not p or branch.name == p or branch.name.startswith(p + ".")]
        if fitting:
            scopes[max(fitting, key=len)].append(branch)
    for prefix, theirs in scopes.items():
        if prefix and not theirs:
            known = ", ".join(repr(branch.name) for branch in branches) or "none"
            raise ValueError(f"alignment names {prefix!r}, but the branches of this network that can move are: {known}")
    return scopes

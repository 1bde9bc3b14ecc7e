"""Alignment: at which of its possible stages a branch acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ocnopt.distributed import World
from ocnopt.games.bandit import Bandit, EXP3PlusPlus
from ocnopt.games.schedule import Branch, Schedule

_NAMES = ("first", "last", "random", "adaptive")


def _is_rule(value: Any) -> bool:
    return (type(value) is int and value >= 0) or (isinstance(value, str) and value in _NAMES)


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

    def __post_init__(self) -> None:
        if not _is_rule(self.rule):
            raise ValueError(f"rule must be one of {', '.join(map(repr, _NAMES))} or a number ≥ 0, got {self.rule!r}")
        if self.reward is not None and not callable(self.reward):
            raise TypeError(f"reward must be a function without arguments, got {self.reward!r}")
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"every must be a whole number ≥ 1, got {self.every!r}")

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
        return cls("adaptive", reward, every, bandit)

    @classmethod
    def of(cls, value: Any) -> Alignment | None:
        """The rule that an argument means, or ``None`` if it means none."""
        if isinstance(value, Alignment):
            return value
        return cls(value) if _is_rule(value) else None


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
        self._bandits: dict[tuple[str, int], Bandit] = {}  # by prefix and number of arms
        self._choices: dict[str, tuple[int, int]] = {}  # arms and arm of adaptive rules, until they get their reward
        self._asked: set[str] = set()  # rules with a reward function of their own
        self._steps = 0
        self.world = World()  # all processes that train one network must choose the same

    def choose(
        self, rules: Mapping[str, Alignment], schedule: Schedule, modules: Callable[[], Sequence[str]]
    ) -> dict[str, int]:
        """By how many stages each branch is late. ``modules``: the names that there are."""
        scopes = _scopes(rules, schedule.branches, modules)
        late: dict[str, int] = {}
        for prefix in sorted(scopes, key=lambda prefix: rules[prefix].rule == "adaptive"):  # what may be refused first
            branches = scopes[prefix]
            delay = self._delay(prefix, rules[prefix], branches)
            late |= {branch.name: min(delay, branch.slack) for branch in branches}
        return {branch.name: late[branch.name] for branch in schedule.branches if branch.name in late}

    def _delay(self, prefix: str, rule: Alignment, branches: Sequence[Branch]) -> int:
        most = max((branch.slack for branch in branches), default=0)
        if isinstance(rule.rule, int):
            if rule.rule and not branches and not prefix:
                raise ValueError(f"alignment={rule.rule} is not possible: no branch of this network can be late")
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
        bandit = self._bandit(prefix, rule, arms)
        (self._asked.add if rule.reward is not None else self._asked.discard)(prefix)
        if self._choices.get(prefix, (0, 0))[0] != arms:  # none, or of a pass with fewer or more to choose from
            self._choices[prefix] = arms, bandit.choose(self._random())
        return self._choices[prefix][1]

    def _bandit(self, prefix: str, rule: Alignment, arms: int) -> Bandit:
        if (prefix, arms) not in self._bandits:
            self._bandits[prefix, arms] = rule.bandit(arms)
        return self._bandits[prefix, arms]

    def _random(self) -> torch.Generator:
        # of its own: choosing must not change the random numbers of the training loop
        if self._generator is None:
            seeds = self.world.gather_ints([torch.initial_seed() & (1 << 63) - 1])
            self._generator = torch.Generator().manual_seed(seeds[0][0])
        return self._generator

    def reward(self, value: float) -> None:
        """For all rules that have no reward function of their own."""
        waiting = [prefix for prefix in self._choices if prefix not in self._asked]
        if not waiting:
            raise RuntimeError("reward: no adaptive alignment has been played since the last reward")
        for prefix in waiting:
            self._give(prefix, value)

    def _give(self, prefix: str, value: float) -> None:
        self._bandits[prefix, self._choices[prefix][0]].update(value)
        del self._choices[prefix]

    def after_step(self, rules: Mapping[str, Alignment]) -> None:
        """Ask for rewards that are due."""
        self._steps += 1
        for prefix, rule in rules.items():
            if rule.reward is not None and prefix in self._choices and self._steps % rule.every == 0:
                self._give(prefix, rule.reward())

    @property
    def bandits(self) -> dict[str, Bandit]:
        """By prefix; where the number of arms varies from pass to pass, the one with the most."""
        return {prefix: bandit for (prefix, _), bandit in sorted(self._bandits.items(), key=lambda item: item[0])}

    def state_dict(self) -> dict[str, Any]:
        if self._generator is None:
            return {}
        return {
            "generator": self._generator.get_state(),
            "bandits": [[prefix, arms, bandit.state_dict()] for (prefix, arms), bandit in self._bandits.items()],
            "choices": {prefix: list(choice) for prefix, choice in self._choices.items()},
            "steps": self._steps,
        }

    def load_state_dict(self, state: Mapping[str, Any], rules: Mapping[str, Alignment]) -> None:
        """``rules`` say which kind of bandit each prefix has."""
        self._generator, self._bandits, self._choices, self._steps = None, {}, {}, 0
        if not state:
            return
        self._generator = torch.Generator().set_state(state["generator"].cpu())
        for prefix, arms, theirs in state["bandits"]:
            if prefix in rules:
                self._bandit(prefix, rules[prefix], arms).load_state_dict(theirs)
        self._choices = {p: (arms, arm) for p, (arms, arm) in state["choices"].items() if (p, arms) in self._bandits}
        self._asked = {prefix for prefix, rule in rules.items() if rule.reward is not None}
        self._steps = state["steps"]


def _scopes(
    rules: Mapping[str, Alignment], branches: Sequence[Branch], modules: Callable[[], Sequence[str]]
) -> dict[str, list[Branch]]:
    """The branches that each rule is for: the longest prefix counts."""
    scopes: dict[str, list[Branch]] = {prefix: [] for prefix in rules}
    for branch in branches:
        fitting = [prefix for prefix in rules if _is_for(prefix, branch.name.partition("#")[0])]
        if fitting:
            scopes[max(fitting, key=len)].append(branch)
    for prefix, theirs in scopes.items():
        # a branch that this pass did not take is still one
        if prefix and not theirs and prefix not in modules():
            known = ", ".join(repr(branch.name) for branch in branches) or "none"
            raise ValueError(f"alignment names {prefix!r}, but the branches of this network that can move are: {known}")
    return scopes


def _is_for(prefix: str, name: str) -> bool:
    return not prefix or name == prefix or name.startswith(prefix + ".")

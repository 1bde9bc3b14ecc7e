"""Multi-armed bandits: which of K arms to play next, when only the reward of the arm played is ever seen.

In a game the arms are the placements of a skip module and the reward is the validation accuracy (Section VI.B).
EXP3++ is the paper's choice: nothing need be known of how the rewards come about. Where they are draws from fixed
distributions its regret grows like a power of ln t, and it is at most 4 √(t K ln K) even if an adversary wrote
all rewards down before the first round. ``UCB1`` and ``EXP3`` stand at the two ends between which it lies: the first
is made for draws and can be fooled in every round, the second trusts nothing and pays √t for that always.

K is small and a round is a few dozen operations on numbers, so they are plain Python: nothing to move to a device,
nothing to convert in a checkpoint.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import UnionType
from typing import Any, ClassVar

import torch


class Bandit(ABC):
    """``choose`` an arm, see what it brings, ``update`` with the reward; over and over.

    A choice that never gets its reward is forgotten at the next one, as if that round had not taken place.
    """

    #: attributes that make up the state: a list with one number for each arm
    per_arm: ClassVar[tuple[str, ...]]
    #: attributes that go into the state as they are
    settings: ClassVar[tuple[str, ...]] = ()

    def __init__(self, arms: int) -> None:
        if not _is_number(arms, int) or arms < 1:
            raise ValueError(f"arms must be a whole number ≥ 1, got {arms!r}")
        self.arms = arms
        #: rounds played to their end
        self.rounds = 0
        self._choice: int | None = None
        self._chance = 1.0
        for name in self.per_arm:
            setattr(self, name, [0.0] * arms)

    @property
    @abstractmethod
    def probabilities(self) -> list[float]:
        """The chance of each arm to be chosen next."""

    @abstractmethod
    def _learn(self, arm: int, chance: float, reward: float) -> None:
        """Take in the reward of an arm that had been chosen with a certain chance."""

    def choose(self, generator: torch.Generator | None = None) -> int:
        """The arm of this round, drawn with one number of the generator (or of torch's own, if none is given)."""
        device = None if generator is None else generator.device
        number = float(torch.rand((), generator=generator, device=device, dtype=torch.float64))
        probabilities = self.probabilities
        arm = _draw(probabilities, number)
        self._choice, self._chance = arm, probabilities[arm]
        return arm

    def update(self, reward: float) -> None:
        """What the arm chosen last has brought: a number in [0, 1]."""
        if self._choice is None:
            raise RuntimeError("update: no arm was chosen, or its reward is in already; call choose first")
        value = float(reward)
        if not 0.0 <= value <= 1.0:  # false for NaN too
            raise ValueError(f"reward must be a number in [0, 1], got {value!r}")
        self._learn(self._choice, self._chance, value)
        self.rounds += 1
        self._choice = None

    def state_dict(self) -> dict[str, Any]:
        """Everything a run needs to go on with the same choices, also between ``choose`` and ``update``."""
        state: dict[str, Any] = {name: list(getattr(self, name)) for name in self.per_arm}
        state |= {name: getattr(self, name) for name in self.settings}
        return state | {"rounds": self.rounds, "choice": self._choice, "chance": self._chance}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        expected = self.state_dict()
        if state_dict.keys() != expected.keys():
            raise ValueError(
                f"state of another bandit: {type(self).__name__} has {sorted(expected)}, got {sorted(state_dict)}"
            )
        for name in self.per_arm:
            if len(state_dict[name]) != self.arms:
                raise ValueError(f"{name} is of {len(state_dict[name])} arms, and this bandit has {self.arms}")
        for name in self.per_arm:
            setattr(self, name, list(state_dict[name]))
        for name in self.settings:
            setattr(self, name, state_dict[name])
        self.rounds = state_dict["rounds"]
        self._choice, self._chance = state_dict["choice"], state_dict["chance"]

    def __repr__(self) -> str:
        settings = "".join(f", {name}={getattr(self, name):g}" for name in self.settings)
        return f"{type(self).__name__}({self.arms}{settings})"


class EXP3PlusPlus(Bandit):
    """EXP3++ (Seldin and Slivkins, ICML 2014): exponential weights, and exploration where the gaps are not yet clear.

    In round t, with losses ℓ = 1 − reward, arm a is played with probability

        ρ̃_t(a) = (1 − Σ_b ε_t(b)) ρ_t(a) + ε_t(a),    ρ_t(a) ∝ exp(−η_t L̃_{t−1}(a)),

    where η_t = ½ √(ln K / (t K)), L̃ are the losses summed with importance weights ℓ / ρ̃, and an arm is explored
    with ε_t(a) = min(1/2K, η_t, ξ_t(a)). The last of these reads the gaps Δ̂ that the losses show:

        ξ_t(a) = c (ln t)² / (t Δ̂_{t−1}(a)²),    Δ̂_t(a) = min(1, (L̃_t(a) − min_b L̃_t(b)) / t).

    :param arms: K
    :param c: the bound 4 √(t K ln K) against an adversary holds whatever it is. The theorem on draws from fixed
        distributions has c = 18, with which ξ is not the smallest of the three before the 10⁸th round;
        the default lets it act within hundreds.
    """

    per_arm = ("losses",)
    settings = ("c",)
    losses: list[float]

    def __init__(self, arms: int, *, c: float = 1 / 64) -> None:
        super().__init__(arms)
        if not _is_number(c, int | float) or not 0 <= c < math.inf:
            raise ValueError(f"c must be a number ≥ 0, got {c!r}")
        self.c = float(c)

    @property
    def gaps(self) -> list[float]:
        """Δ̂: how much more an arm loses in a round than the best one does, as far as the losses tell."""
        if self.rounds == 0:
            return [0.0] * self.arms
        best = min(self.losses)
        return [min(1.0, (loss - best) / self.rounds) for loss in self.losses]

    @property
    def probabilities(self) -> list[float]:
        t = self.rounds + 1
        eta = 0.5 * math.sqrt(math.log(self.arms) / (t * self.arms))
        most = min(0.5 / self.arms, eta)
        # an arm without a gap is explored as much as any may be: its ξ is infinite
        epsilon = [min(most, self.c * math.log(t) ** 2 / (t * gap**2)) if gap else most for gap in self.gaps]
        rest = 1.0 - sum(epsilon)
        weights = _softmax([-eta * loss for loss in self.losses])
        return [rest * rho + e for rho, e in zip(weights, epsilon, strict=True)]

    def _learn(self, arm: int, chance: float, reward: float) -> None:
        self.losses[arm] += (1.0 - reward) / chance


class EXP3(Bandit):
    """EXP3 (Auer, Cesa-Bianchi, Freund and Schapire 2002), with a rate that falls so that no horizon is needed.

    ρ̃_t = (1 − γ_t) softmax(γ_t R̃ / K) + γ_t / K, with rewards R̃ summed with importance weights and
    γ_t = min(1, √(K ln K / ((e − 1) t))). Explores all arms alike, for ever.
    """

    per_arm = ("rewards",)
    rewards: list[float]

    @property
    def probabilities(self) -> list[float]:
        K = self.arms
        gamma = min(1.0, math.sqrt(K * math.log(K) / ((math.e - 1) * (self.rounds + 1))))
        weights = _softmax([gamma * reward / K for reward in self.rewards])
        return [(1.0 - gamma) * weight + gamma / K for weight in weights]

    def _learn(self, arm: int, chance: float, reward: float) -> None:
        self.rewards[arm] += reward / chance


class UCB1(Bandit):
    """UCB1 (Auer, Cesa-Bianchi and Fischer 2002): the arm with the largest mean + √(2 ln t / plays).

    Each arm once first. Not random at all: whoever knows it can give every arm its rewards when it is not played.
    """

    per_arm = ("rewards", "plays")
    rewards: list[float]
    plays: list[float]

    @property
    def probabilities(self) -> list[float]:
        indices = [self._index(arm) for arm in range(self.arms)]
        best = indices.index(max(indices))
        return [float(arm == best) for arm in range(self.arms)]

    def _index(self, arm: int) -> float:
        if not self.plays[arm]:
            return math.inf
        return (self.rewards[arm] + math.sqrt(2 * math.log(self.rounds) * self.plays[arm])) / self.plays[arm]

    def _learn(self, arm: int, chance: float, reward: float) -> None:
        self.rewards[arm] += reward
        self.plays[arm] += 1


def _is_number(value: Any, kind: type | UnionType) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _softmax(logits: Sequence[float]) -> list[float]:
    largest = max(logits)
    weights = [math.exp(logit - largest) for logit in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


def _draw(probabilities: Sequence[float], number: float) -> int:
    """The arm on whose piece of [0, 1] the number lies; past the end by a rounding error: the last that is possible."""
    last = 0
    for arm, probability in enumerate(probabilities):
        if probability > 0.0:
            last = arm
            number -= probability
            if number < 0.0:
                break
    return last

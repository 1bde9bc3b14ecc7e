"""What the bandits share: an interface, errors, state; and the formulas of EXP3++, by hand."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch

from ocnopt.games.bandit import EXP3, UCB1, Bandit, EXP3PlusPlus

KINDS = (EXP3PlusPlus, EXP3, UCB1)
kinds = pytest.mark.parametrize("kind", KINDS)
MEANS = (0.3, 0.8, 0.5)


def play(bandit: Bandit, generator: torch.Generator, rounds: int) -> list[int]:
    """Rewards that are draws: which arms were chosen."""
    arms = []
    for _ in range(rounds):
        arms.append(bandit.choose(generator))
        bandit.update(float(torch.rand((), generator=generator) < MEANS[arms[-1]]))
    return arms


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Through a file, as a checkpoint goes."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@kinds
def test_same_seed_same_arms(kind: type[Bandit]) -> None:
    first, again = (play(kind(3), torch.Generator().manual_seed(5), 200) for _ in range(2))
    assert first == again
    assert set(first) == {0, 1, 2}


@pytest.mark.parametrize("kind", [EXP3PlusPlus, EXP3])
def test_another_seed_other_arms(kind: type[Bandit]) -> None:
    assert play(kind(3), torch.Generator().manual_seed(5), 50) != play(kind(3), torch.Generator().manual_seed(6), 50)


@kinds
def test_state_continues_the_sequence(kind: type[Bandit]) -> None:
    generator = torch.Generator().manual_seed(0)
    bandit, restored = kind(3), kind(3)
    play(bandit, generator, 100)
    restored.load_state_dict(copied(bandit.state_dict()))
    assert restored.rounds == 100
    other = torch.Generator()
    other.set_state(generator.get_state())
    assert play(restored, other, 100) == play(bandit, generator, 100)
    assert restored.state_dict() == bandit.state_dict()


@kinds
def test_state_between_choice_and_reward(kind: type[Bandit]) -> None:
    generator = torch.Generator().manual_seed(0)
    bandit, restored = kind(3), kind(3)
    play(bandit, generator, 20)
    bandit.choose(generator)
    restored.load_state_dict(copied(bandit.state_dict()))
    for b in (bandit, restored):
        b.update(0.25)
    assert restored.state_dict() == bandit.state_dict()


@kinds
def test_state_is_a_copy(kind: type[Bandit]) -> None:
    generator = torch.Generator().manual_seed(0)
    bandit, restored = kind(3), kind(3)
    play(bandit, generator, 5)
    state = bandit.state_dict()
    restored.load_state_dict(state)
    kept = copied(state)
    play(bandit, generator, 5)
    play(restored, generator, 5)
    assert state == kept


def test_settings_are_restored() -> None:
    restored = EXP3PlusPlus(3)
    restored.load_state_dict(EXP3PlusPlus(3, c=18).state_dict())
    assert repr(restored) == "EXP3PlusPlus(3, c=18)"


def test_state_of_another_bandit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"state of another bandit: UCB1 has .*'plays'"):
        UCB1(3).load_state_dict(EXP3(3).state_dict())


def test_state_of_another_number_of_arms_is_refused() -> None:
    bandit = EXP3PlusPlus(3)
    with pytest.raises(ValueError, match="losses is of 4 arms, and this bandit has 3"):
        bandit.load_state_dict(EXP3PlusPlus(4, c=2).state_dict())
    assert bandit.state_dict() == EXP3PlusPlus(3).state_dict()


@kinds
@pytest.mark.parametrize("arms", [0, -1, 2.0, True, "two"])
def test_number_of_arms(kind: type[Bandit], arms: Any) -> None:
    with pytest.raises(ValueError, match="arms must be a whole number ≥ 1"):
        kind(arms)


@pytest.mark.parametrize("c", [-1.0, math.nan, math.inf, True, "1"])
def test_c(c: Any) -> None:
    with pytest.raises(ValueError, match="c must be a number ≥ 0"):
        EXP3PlusPlus(2, c=c)


@kinds
@pytest.mark.parametrize("reward", [-0.01, 1.01, math.nan, math.inf])
def test_reward_outside(kind: type[Bandit], reward: float) -> None:
    bandit = kind(2)
    bandit.choose()
    with pytest.raises(ValueError, match=r"reward must be a number in \[0, 1\], got"):
        bandit.update(reward)
    bandit.update(0.5)  # the choice still stands
    assert bandit.rounds == 1


@kinds
def test_reward_without_choice(kind: type[Bandit]) -> None:
    bandit = kind(2)
    with pytest.raises(RuntimeError, match="no arm was chosen"):
        bandit.update(1.0)
    bandit.choose()
    bandit.update(1.0)
    with pytest.raises(RuntimeError, match="its reward is in already"):
        bandit.update(1.0)
    assert bandit.rounds == 1


@kinds
def test_choice_without_reward_is_forgotten(kind: type[Bandit]) -> None:
    bandit, untouched = kind(2), kind(2)
    for _ in range(5):
        bandit.choose()
    assert bandit.rounds == 0
    assert bandit.probabilities == untouched.probabilities


@kinds
def test_one_arm(kind: type[Bandit]) -> None:
    bandit = kind(1)
    for _ in range(3):
        assert bandit.probabilities == [1.0]
        assert bandit.choose() == 0
        bandit.update(0.0)


@kinds
def test_probabilities_are_the_chances(kind: type[Bandit]) -> None:
    generator = torch.Generator().manual_seed(1)
    bandit = kind(3)
    play(bandit, generator, 30)
    probabilities = bandit.probabilities
    assert math.isclose(sum(probabilities), 1.0)
    draws = 4000
    seen = [0, 0, 0]
    for _ in range(draws):
        seen[bandit.choose(generator)] += 1
    for count, p in zip(seen, probabilities, strict=True):
        assert abs(count / draws - p) <= 4 * math.sqrt(p * (1 - p) / draws)


@kinds
def test_a_tensor_is_a_reward(kind: type[Bandit]) -> None:
    bandit = kind(2)
    bandit.choose()
    bandit.update(torch.tensor(0.5))  # type: ignore[arg-type]
    assert all(isinstance(v, float) for name in kind.per_arm for v in bandit.state_dict()[name])


def test_huge_losses_and_rewards_do_not_overflow() -> None:
    bandit = EXP3PlusPlus(2)
    bandit.load_state_dict(bandit.state_dict() | {"losses": [2e9, 1e9], "rounds": 10})
    assert bandit.probabilities[1] > 0.9
    exp3 = EXP3(2)
    exp3.load_state_dict(exp3.state_dict() | {"rewards": [1e9, 2e9], "rounds": 10000})
    assert exp3.probabilities[1] > 0.9


def test_exp3pp_by_hand() -> None:
    """Three rounds worked out with the formulas as the paper has them."""
    K, c = 2, 0.02
    bandit = EXP3PlusPlus(K, c=c)
    losses = [0.0, 0.0]
    generator = torch.Generator().manual_seed(3)
    for t, reward in enumerate((0.25, 0.75, 0.5, 0.0, 1.0, 0.5), start=1):
        beta = 0.5 * math.sqrt(math.log(K) / (t * K))
        gap = [min(1, (L - min(losses)) / (t - 1)) if t > 1 else 0 for L in losses]
        xi = [c * math.log(t) ** 2 / (t * g**2) if g else math.inf for g in gap]
        epsilon = [min(1 / (2 * K), beta, x) for x in xi]
        rho = [math.exp(-beta * L) / sum(math.exp(-beta * M) for M in losses) for L in losses]
        mixed = [(1 - sum(epsilon)) * r + e for r, e in zip(rho, epsilon, strict=True)]
        assert bandit.gaps == pytest.approx(gap)
        assert bandit.probabilities == pytest.approx(mixed, rel=1e-12)
        arm = bandit.choose(generator)
        bandit.update(reward)
        losses[arm] += (1 - reward) / mixed[arm]
    assert bandit.losses == pytest.approx(losses)
    assert min(epsilon) < beta  # ξ has been the smallest


def test_exp3_by_hand() -> None:
    bandit, K = EXP3(3), 3
    bandit.load_state_dict(bandit.state_dict() | {"rewards": [1.0, 4.0, 2.5], "rounds": 49})
    gamma = math.sqrt(K * math.log(K) / ((math.e - 1) * 50))
    weights = [math.exp(gamma * r / K) for r in (1.0, 4.0, 2.5)]
    expected = [(1 - gamma) * w / sum(weights) + gamma / K for w in weights]
    assert bandit.probabilities == pytest.approx(expected, rel=1e-12)
    arm = bandit.choose(torch.Generator().manual_seed(0))
    bandit.update(0.5)
    assert bandit.rewards[arm] == pytest.approx((1.0, 4.0, 2.5)[arm] + 0.5 / expected[arm])


def test_ucb1_by_hand() -> None:
    bandit = UCB1(2)
    chosen = []
    for _ in range(2):  # each arm once
        chosen.append(bandit.choose())
        bandit.update(0.5)
    assert chosen == [0, 1]
    bandit.load_state_dict(bandit.state_dict() | {"rewards": [9.0, 1.5], "plays": [12.0, 3.0], "rounds": 15})
    # 0.75 + √(2 ln 15 / 12) = 1.42 against 0.5 + √(2 ln 15 / 3) = 1.84
    assert bandit.choose() == 1
    bandit.load_state_dict(bandit.state_dict() | {"rewards": [9.0, 0.1], "plays": [12.0, 3.0], "rounds": 15})
    # 1.42 against 0.03 + 1.34 = 1.38
    assert bandit.choose() == 0

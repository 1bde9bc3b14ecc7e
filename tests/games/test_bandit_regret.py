"""Regret of EXP3++ on draws from fixed distributions and against adversaries, beside UCB1 and EXP3."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ocnopt.games.bandit import EXP3, UCB1, Bandit, EXP3PlusPlus

Array = NDArray[np.float64]


def bound(t: int, K: int) -> float:
    """Theorem 1 of Seldin and Slivkins."""
    return 4 * math.sqrt(t * K * math.log(K))


def regret(bandit: Bandit, rewards: Array, seed: int) -> Array:
    """Against the arm that is best in hindsight, round by round: the regret expected of the choice, not of its draw."""
    generator = torch.Generator().manual_seed(seed)
    received = []
    for row in rewards.tolist():
        received.append(sum(p * r for p, r in zip(bandit.probabilities, row, strict=True)))
        bandit.update(row[bandit.choose(generator)])
    best = int(rewards.sum(axis=0).argmax())
    curve: Array = np.cumsum(rewards[:, best] - np.array(received))
    return curve


# ---- draws from fixed distributions

MEANS, T, RUNS, KNOWN = (0.1, 0.9), 4000, 12, 400


@cache
def on_draws(kind: type[Bandit]) -> Array:
    """The mean over runs of the pseudo-regret: gaps times the chance to play them."""
    total = np.zeros(T)
    for seed in range(RUNS):
        rewards = np.random.default_rng(seed).random((T, len(MEANS))) < np.array(MEANS)
        bandit, generator = kind(len(MEANS)), torch.Generator().manual_seed(seed)
        for t, row in enumerate(rewards.tolist()):
            total[t] += sum(p * (max(MEANS) - mean) for p, mean in zip(bandit.probabilities, MEANS, strict=True))
            bandit.update(float(row[bandit.choose(generator)]))
    curve: Array = np.cumsum(total / RUNS)
    return curve


def misfit(curve: Array, shape: Array) -> float:
    """Root mean square of what a + b·shape leaves of a curve."""
    columns = np.stack([np.ones_like(shape), shape], axis=1)
    left = curve - columns @ np.linalg.lstsq(columns, curve, rcond=None)[0]
    return float(np.sqrt(np.mean(left**2)))


def shapes(curve: Array) -> tuple[float, float]:
    """Misfits of ln² t and of √t once the better arm is known: until then the regret of all is that of not knowing."""
    t = np.arange(1, T + 1, dtype=np.float64)[KNOWN:]
    return misfit(curve[KNOWN:], np.log(t) ** 2), misfit(curve[KNOWN:], np.sqrt(t))


def test_draws_grow_like_a_logarithm() -> None:
    squared_log, root = shapes(on_draws(EXP3PlusPlus))
    assert squared_log < 0.7 * root


def test_draws_slow_down() -> None:
    """Regret of the second half of the rounds: less than a curve ∝ ln² t, let alone one ∝ √t, would leave to it."""
    curve = on_draws(EXP3PlusPlus)
    assert curve[-1] - curve[T // 2] < curve[-1] * (1 - (math.log(T / 2) / math.log(T)) ** 2)


def test_exp3_grows_like_a_root_on_the_same_draws() -> None:
    squared_log, root = shapes(on_draws(EXP3))
    assert root < squared_log / 2


def test_draws_beside_the_others() -> None:
    ours, exp3, ucb1 = (on_draws(kind) for kind in (EXP3PlusPlus, EXP3, UCB1))
    assert ucb1[-1] < ours[-1] < exp3[-1]
    # what it pays for safety is paid early: later it learns as fast as the one made for draws
    late = slice(T // 2, None, T // 2 - 1)
    assert np.diff(ours[late])[0] < 1.5 * np.diff(ucb1[late])[0]
    assert np.diff(ours[late])[0] < np.diff(exp3[late])[0] / 3


def test_exploration_reads_the_gaps() -> None:
    """Without them (c so large that ξ is never the smallest) the regret is that of exploring for ever."""
    rewards = (np.random.default_rng(0).random((T, 2)) < np.array(MEANS)).astype(np.float64)
    with_gaps, without = (regret(EXP3PlusPlus(2, c=c), rewards, seed=0) for c in (1 / 64, 18))
    assert with_gaps[-1] - with_gaps[T // 2] < 0.5 * (without[-1] - without[T // 2])


# ---- adversaries


def against_ucb1(T: int, K: int) -> Array:
    """Rewards written down in advance by someone who knows UCB1: its arm gets nothing, all others one."""
    rewards = np.ones((T, K))
    ucb1 = UCB1(K)
    for row in rewards:
        row[ucb1.choose()] = 0.0
        ucb1.update(0.0)
    return rewards


def switching(T: int, K: int, period: int) -> Array:
    """One arm pays, another one in the next period, and so on; arm 0 pays a little always."""
    rewards = np.zeros((T, K))
    for t in range(T):
        rewards[t, (t // period) % K] = 1.0
    rewards[:, 0] = np.maximum(rewards[:, 0], 0.3)
    return rewards


@pytest.mark.parametrize("K", [2, 5])
def test_ucb1_can_be_fooled_in_every_round(K: int) -> None:
    rewards = against_ucb1(1000, K)
    assert regret(UCB1(K), rewards, seed=0)[-1] >= 1000 * (K - 1) / K - 1
    assert regret(EXP3PlusPlus(K), rewards, seed=0)[-1] < bound(1000, K) / 4


ADVERSARIES = {
    "against UCB1": against_ucb1(3000, 3),
    "two arms, slow": switching(3000, 2, 700),
    "three arms, fast": switching(3000, 3, 20),
    "a late change": switching(3000, 2, 1000),
    "all alike": np.full((3000, 4), 0.5),
}


@pytest.mark.parametrize("rewards", ADVERSARIES.values(), ids=ADVERSARIES)
@pytest.mark.parametrize("c", [0.0, 1 / 64, 18.0])
def test_bound_against_adversaries(rewards: Array, c: float) -> None:
    K = rewards.shape[1]
    curves = np.mean([regret(EXP3PlusPlus(K, c=c), rewards, seed) for seed in range(3)], axis=0)
    for t in (300, 1000, 3000):
        # at t < T the best arm of all rounds need not be the best so far: its regret is smaller, the bound holds too
        assert curves[t - 1] < bound(t, K)


def test_regret_against_an_adversary_grows_like_a_root_at_most() -> None:
    """Four times as many rounds: twice the regret, not four times."""
    short, long = (np.mean([regret(EXP3PlusPlus(2), hard(T), s)[-1] for s in range(6)]) for T in (1000, 4000))
    assert long < 2.8 * short
    assert short > bound(1000, 2) / 100  # not a game that is won at once


def hard(T: int) -> Array:
    """The lower bound's instance: a gap of 1/√T, too small to be sure of within T rounds."""
    means = np.array([0.5 + 1 / math.sqrt(T), 0.5])
    return (np.random.default_rng(9).random((T, 2)) < means).astype(np.float64)

"""OCNOpt's games in the lab: their options, and alignment that is rewarded with accuracy on held-out samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.small import create, small_run, without_seconds
from tests.lab.test_trainer import Memory, Stop, stop_at

from ocnopt import OCNOpt
from ocnopt.lab.config import NetworkConfig, RunConfig, parse_run
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.settings import Settings
from ocnopt.lab.trainer import Trainer, evaluate
from ocnopt.lab.training import load_data, train
from ocnopt.lab.world import World

ADAPTIVE = {"name": "ocnopt", "curvature": "identity", "feedback": "nonlinear", "alignment": "adaptive", "lr": 0.1}


def residual_run(optimizer: dict[str, Any] | None = None, **training: Any) -> RunConfig:
    """A block whose skip connection may act at three stages; 100 samples are 80 and 20, five batches an epoch."""
    table = {
        "data": {"name": "DIGITS", "batch_size": 16, "train_limit": 100, "test_limit": 50, "validation": 0.2},
        "network": {"name": "residual", "blocks": 1, "channels": 2, "projection": True},
        "optimizer": optimizer or ADAPTIVE,
        "training": {"epochs": 2, "log_every": 1, **training},
    }
    return parse_run(table)


def trainer_of(config: RunConfig) -> tuple[Trainer, OCNOpt]:
    trainer = Trainer(config, load_data(config.data), Memory())
    assert isinstance(trainer.optimizer, OCNOpt)
    return trainer, trainer.optimizer


def test_the_game_can_be_set_on_a_command_line() -> None:
    spec = "ocnopt:game=noncooperative,alignment=2,state=accumulated,players=3"
    options = Settings(dataset="DIGITS", optimizer=spec, overrides=["optimizer.rank=2"]).run().optimizer.options
    expected = {"game": "noncooperative", "alignment": 2, "state": "accumulated", "players": 3, "rank": 2}
    assert {key: options[key] for key in expected} == expected
    with pytest.raises(ConfigError, match=r"optimizer\.alignment must be 'first', 'last', 'random', 'adaptive'"):
        Settings(dataset="DIGITS", optimizer="ocnopt:alignment=best").run()


@pytest.mark.parametrize("alignment", ["adaptive", "random"])
def test_a_run_goes_on_with_the_same_alignments(alignment: str, tmp_path: Path) -> None:
    """Also where the checkpoint lies between a choice and its reward."""
    config = residual_run({**ADAPTIVE, "alignment": alignment}, checkpoint_every=1, reward_every=2)
    whole, parts = create(tmp_path / "whole", config), create(tmp_path / "parts", config)
    train(whole)
    for moment in (stop_at(4), stop_at(7)):
        with pytest.raises(Stop):
            train(parts, listen=moment)
    train(parts)
    assert without_seconds(parts.metrics()) == without_seconds(whole.metrics())
    ours, theirs = parts.load_checkpoint(), whole.load_checkpoint()
    assert ours is not None
    assert theirs is not None
    assert ours["optimizer"]["game"]["bandits"] == theirs["optimizer"]["game"]["bandits"]
    assert torch.equal(ours["optimizer"]["game"]["generator"], theirs["optimizer"]["game"]["generator"])
    assert all(torch.equal(ours["network"][name], theirs["network"][name]) for name in theirs["network"])
    if alignment == "adaptive":
        assert whole.metrics("alignment")[-1]["rounds"] == 5


def test_the_reward_is_the_accuracy_on_the_next_held_out_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, optimizer = trainer_of(residual_run(reward_every=2))
    seen: list[tuple[list[int], float, bool]] = []
    held_out = trainer.data.validation
    assert held_out is not None
    rewarded = optimizer.game.reward

    def reward(value: float) -> None:
        first = 16 * (trainer.step // 2)
        rows = [i % 20 for i in range(first, first + 16)]
        seen.append((rows, value, evaluate(trainer.network, held_out.take(torch.tensor(rows)))[1] == value))
        rewarded(value)

    monkeypatch.setattr(optimizer.game, "reward", reward)
    trainer.train()
    assert [rows[:5] for rows, _, _ in seen[:2]] == [[16, 17, 18, 19, 0], [12, 13, 14, 15, 16]]
    assert len(seen) == 5
    assert all(right for _, _, right in seen)
    bandit = optimizer.game.bandits[""]
    assert bandit.rounds == 5
    assert isinstance(trainer.journal, Memory)
    first, last = trainer.journal.of("alignment")
    assert (first["step"], first["rounds"], last["step"], last["rounds"]) == (5, 2, 10, 5)
    assert [last[f"late by {arm}"] for arm in range(3)] == bandit.probabilities


def test_the_network_is_in_training_mode_again_after_a_reward() -> None:
    trainer, _ = trainer_of(residual_run())
    modes: list[bool] = []
    trainer.network.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    trainer.train_epoch()
    # each step: forward and, in eval mode, the reward; the rollout runs the stages and not the module
    assert modes == [True, False] * 5


@pytest.mark.filterwarnings("ignore:alignment='adaptive' has no effect")
def test_what_adaptive_alignment_needs() -> None:
    run = residual_run()
    with pytest.raises(ConfigError, match=r"^data\.validation must be > 0 with optimizer\.alignment = 'adaptive'"):
        trainer_of(replace(run, data=replace(run.data, validation=0.0)))
    for feedback, every in (("linear", 1), ("off", 100)):
        trainer, _ = trainer_of(residual_run({**ADAPTIVE, "feedback": feedback}, reward_every=every))
        with pytest.raises(ConfigError, match=r"^optimizer\.alignment: 'adaptive' has nothing to choose"):
            trainer.train()
    trainer, _ = trainer_of(replace(run, network=NetworkConfig("fcn", {})))
    with pytest.raises(ConfigError, match="a branch that can act later"):
        trainer.train()


def test_processes_would_not_agree_on_an_adaptive_alignment() -> None:
    config = small_run({"name": "ocnopt", "bellman": "paper", "alignment": "adaptive"})
    with pytest.raises(ConfigError, match=r"alignment='adaptive' would get another reward in each .* torchrun"):
        Trainer(config, load_data(config.data), Memory(), world=World(0, 2))

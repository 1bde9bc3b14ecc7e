"""The experiments on games, cut down to seconds."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.lab.reproduce.test_experiments import check_folder

from ocnopt.lab.config import parse_run
from ocnopt.lab.reproduce import Bench, bandit, multiplayer, reproduce
from ocnopt.lab.reproduce.tuning import best_rates, spread
from ocnopt.lab.runs import find_runs
from ocnopt.lab.schema import ConfigError


def test_bandit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = bandit.QUICK_CASES[0]
    small = replace(
        case,
        options={**case.options, "channels": 2},
        iterations=4,
        rates=(0.01, 0.02),
        paper=dict.fromkeys(bandit.METHODS, 50),
    )
    monkeypatch.setattr(bandit, "QUICK_CASES", (small,))
    bench = Bench(tmp_path, train_limit=70)
    finding = reproduce("bandit", bench)
    document = check_folder(tmp_path, "bandit", finding)
    ours, paper = finding.rows
    assert ours[:2] == ["DIGITS, residual", "ours"]
    assert paper == ["", "paper", *["**50.00**"] * 4]
    assert isinstance(document["data"], list)
    assert [entry["method"] for entry in document["data"]] == list(bandit.METHODS)
    # two rates for EKFAC and the fixed alignment with one seed; then four methods with three
    runs = {run.path.name: run.config() for run in find_runs([tmp_path])}
    assert len(runs) == 2 * 2 + 4 * 3 - 2
    rates = {entry["method"]: entry["lr"] for entry in document["data"]}
    assert rates["fixed"] == rates["random"] == rates["adaptive"]
    # 63 samples are two batches, so two epochs are the four iterations that were asked for
    assert {config["training"]["epochs"] for config in runs.values()} == {2}
    same = [config["optimizer"] for config in runs.values() if config["optimizer"]["lr"] == rates["EKFAC"]]
    differing = {key for config in same for key in config if config[key] != same[0][key]}
    assert differing == {"feedback", "alignment"}
    assert any("adaptive: after 4 rewards the chances of the alignments are late by 0: " in r for r in finding.remarks)
    assert finding.verdict.startswith("DIGITS, residual: fixed alignment is ")
    with pytest.raises(ConfigError, match="only must name"):
        reproduce("bandit", Bench(tmp_path, only=("GPT",)))


def test_bandit_has_the_rows_of_the_paper() -> None:
    assert {case.dataset: (case.network, case.iterations) for case in bandit.FULL_CASES} == {
        "SVHN": ("residual", 1600),
        "CIFAR10": ("resnet18", 6000),
    }
    assert [case.paper["adaptive"] for case in bandit.FULL_CASES] == [88.33, 85.65]


def test_multiplayer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiplayer, "PLAYERS", (1, 2))
    monkeypatch.setattr(multiplayer, "RATES", dict.fromkeys(multiplayer.CURVATURES, (0.01,)))
    finding = reproduce("multiplayer", Bench(tmp_path, train_limit=70, epochs=1))
    check_folder(tmp_path, "multiplayer", finding)
    assert [row[:2] for row in finding.rows] == [
        ["identity", "N players"],
        ["", "one player, lr × N"],
        ["Gauss–Newton", "N players"],
        ["", "one player, lr × N"],
    ]
    assert finding.rows[0][2] == finding.rows[1][2]  # N = 1 is the same run
    options = [run.config()["optimizer"] for run in find_runs([tmp_path])]
    assert {(o["players"], o["lr"]) for o in options} == {(1, 0.01), (2, 0.01), (1, 0.02)}
    assert {o["bellman"] for o in options} == {"paper"}
    assert finding.verdict.startswith("identity: two players are ")
    with pytest.raises(ConfigError, match="only means nothing here"):
        reproduce("multiplayer", Bench(tmp_path, only=("MNIST",)))


def test_the_rate_is_chosen_on_held_out_samples(tmp_path: Path) -> None:
    table = {
        "data": {"name": "WINE", "batch_size": 26, "validation": 0.2},
        "network": {"name": "fcn"},
        "optimizer": {"name": "adam"},
        "training": {"epochs": 6},
    }
    tried = [parse_run({**table, "optimizer": {"name": "adam", "lr": lr}}) for lr in (1e-6, 0.02, 1e-7)]
    assert best_rates(Bench(tmp_path), {"adam": tried}) == {"adam": 0.02}


def test_spread() -> None:
    assert spread([1.0]) == "1.00"
    assert spread([1.0, 3.0], digits=1, sign="+") == "+2.0 ± 1.4"

"""Neural ODEs in the lab: configurations, training, densities in every table, solves that fail."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.small import create
from torch import nn
from typer.testing import CliRunner

from ocnopt.lab.cli import make_app
from ocnopt.lab.config import parse_run
from ocnopt.lab.report import reading
from ocnopt.lab.runs import Record, RunFolder, find_runs
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.tables import draw, summarise
from ocnopt.lab.tasks import DENSITY, score, show_score
from ocnopt.lab.trainer import Trainer
from ocnopt.lab.training import Silence, load_data, train
from ocnopt.lab.world import World


class Pair(World):
    """As if there were a second process."""

    def wrap(self, network: nn.Module) -> nn.Module:
        return network


KRONECKER = {"name": "ocnopt", "curvature": "kronecker", "refresh_every": 3}


def circle(optimizer: dict[str, Any], seed: int = 0, **network: Any) -> dict[str, Any]:
    return {
        "data": {"name": "Circle", "batch_size": 64, "train_limit": 256, "test_limit": 100},
        "network": {"name": "ffjord", "width": 8, "depth": 1, "rtol": 1e-3, "atol": 1e-3, **network},
        "optimizer": optimizer,
        "training": {"epochs": 2, "log_every": 1, "seed": seed},
    }


def images(**network: Any) -> dict[str, Any]:
    return {
        "data": {"name": "DIGITS", "batch_size": 64, "train_limit": 128, "test_limit": 50},
        "network": {"name": "conv_ode", "channels": 4, **network},
        "optimizer": {**KRONECKER, "lr": 0.01},
        "training": {"epochs": 2, "log_every": 1},
    }


def trained(folder: Path, table: dict[str, Any]) -> tuple[RunFolder, Record]:
    run = create(folder, parse_run(table))
    return run, train(run)


@pytest.mark.parametrize("optimizer", [{"name": "adam"}, KRONECKER, {"name": "ekfac"}], ids=lambda o: o["name"])
def test_a_density_is_measured_by_its_loss(optimizer: dict[str, Any], tmp_path: Path) -> None:
    run, final = trained(tmp_path / "run", circle({**optimizer, "lr": 0.01}))
    assert set(final) == {"kind", "test_loss", "train_loss", "seconds", "diverged"}
    first, second = run.metrics("epoch")
    assert {"test_loss", "validation_loss"} <= set(first)
    assert not any(key.endswith("accuracy") for key in first)
    assert second["train_loss"] < first["train_loss"]
    assert final["test_loss"] == second["test_loss"]
    assert not final["diverged"]
    assert score(final) == -final["test_loss"]
    assert show_score(final) == f"test loss {final['test_loss']:.4f}"
    assert reading.load(run).test_loss == final["test_loss"]


def test_the_loss_of_knowing_nothing() -> None:
    dataset = load_data(parse_run(circle({"name": "adam"})).data)
    assert DENSITY.guessing(dataset) == pytest.approx(math.log(2 * math.pi * math.e))


def test_the_loss_of_a_density_is_minus_its_logarithm() -> None:
    logarithms, nothing = torch.tensor([1.0, 3.0]), torch.zeros(2)
    assert DENSITY.loss(logarithms, nothing, "mean") == -2
    assert DENSITY.loss(logarithms, nothing, "sum") == -4


def test_tables_of_a_density_show_losses(tmp_path: Path) -> None:
    from rich.console import Console

    for lr in (1e-3, 1e-2):
        for seed in (0, 1):
            trained(tmp_path / f"{lr}-{seed}", circle({"name": "adam", "lr": lr}, seed))
    rows = summarise(find_runs([tmp_path]))
    assert [row.test_accuracy for row in rows] == [None, None]
    console = Console(width=100, record=True)
    console.print(draw(rows))
    text = console.export_text()
    assert "test loss" in text
    assert "accuracy" not in text
    best = max(rows, key=lambda row: row.validation_score)
    assert f"{best.key.lr:g} *" in text
    assert best.test_loss is not None
    assert best.test_loss.show(3) in text
    assert best.validation_score == -best.validation_loss.mean


def test_a_sweep_of_a_density_chooses_the_smallest_loss(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "[data]\nname = 'Circle'\nbatch_size = 64\ntrain_limit = 128\ntest_limit = 50\n"
        "[network]\nname = 'ffjord'\nwidth = 4\ndepth = 1\nrtol = 1e-3\natol = 1e-3\n"
        "[optimizer]\nname = 'adam'\n[training]\nepochs = 1\n"
        "[grids.adam]\nlr = [1e-5, 0.05]\n[paper]\nadam = -6.42\n"
    )
    arguments = ["sweep", str(recipe), "--storage", str(tmp_path / "s.db"), "--out", str(tmp_path / "runs")]
    result = CliRunner(env={"COLUMNS": "160"}).invoke(make_app(), [*arguments, "--workers", "1"])
    assert result.exit_code == 0, result.output
    assert "lr=0.05" in result.output
    assert "test loss" in result.output
    assert "-6.42" in result.output


def test_what_does_not_fit_is_named() -> None:
    cases = [
        ({**circle({"name": "adam"}), "network": {"name": "fcn"}}, "data.name: Circle has no classes, and fcn class"),
        ({**images(), "network": {"name": "ffjord"}}, "network.name: ffjord is a density, and DIGITS has classes"),
        ({**images(), "data": {"name": "DIGITS", "missing": 0.3}}, "data.missing is for time series, and DIGITS"),
        ({**images(), "data": {"name": "CharacterTrajectories", "stride": 2}}, "data.stride is for time series"),
        (
            {**images(), "data": {"name": "CharacterTrajectories"}, "network": {"name": "ode_rnn"}},
            "data.missing must be a number from 0 to 1: ode_rnn reads",
        ),
    ]
    for table, message in cases:
        with pytest.raises(ConfigError, match=message):
            parse_run(table)


def test_batch_optimizers_do_not_learn_densities(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match=r"ddp|DDP|emsa|E-MSA|chain|Sequential"):
        trained(tmp_path / "run", circle({"name": "ddp"}))


def test_horizons_are_on_record(tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run", images(learn_time="feedback", time_penalty=1.0))
    times = [record["horizons"]["4"] for record in run.metrics("step")]
    assert len(times) == 4
    assert times[-1] < times[0] <= 1.0
    plain, _ = trained(tmp_path / "plain", images())
    assert all("horizons" not in record for record in plain.metrics("step"))


@pytest.mark.parametrize("method", ["feedback", "first_order"])
@pytest.mark.parametrize("name", ["adam", "sgdm", "ocnopt"])
def test_every_optimizer_of_torch_learns_a_final_time(name: str, method: str, tmp_path: Path) -> None:
    table = {**images(learn_time=method, time_penalty=1.0), "optimizer": {"name": name, "lr": 1e-3}}
    run, _ = trained(tmp_path / "run", table)
    times = [record["horizons"]["4"] for record in run.metrics("step")]
    assert len(set(times)) == 4  # one move a step: nobody follows twice
    assert 0.5 < times[-1] < times[0] < 1.0


def test_final_times_that_nobody_can_learn_are_refused(tmp_path: Path) -> None:
    table = {**images(learn_time="feedback"), "optimizer": {"name": "muon"}}
    with pytest.raises(ConfigError, match=r"network\.learn_time must be 'off' with muon"):
        trained(tmp_path / "run", table)
    config = parse_run(images(learn_time="feedback") | {"optimizer": {"name": "adam"}})
    with pytest.raises(ConfigError, match=r"network\.learn_time: T follows the samples of one process"):
        Trainer(config, load_data(config.data), Silence(), world=Pair(0, 2))


def test_a_solve_that_fails_ends_the_run(tmp_path: Path) -> None:
    table = circle({"name": "sgdm", "lr": 1e6})
    with pytest.warns(UserWarning, match=r"FlowField.*solve failed.*the run ends here, after \d+ steps"):
        run, final = trained(tmp_path / "run", table)
    assert final["diverged"]
    assert final["test_loss"] is None
    assert score(final) == -math.inf
    assert train(run) == final  # and stays ended


def test_where_no_answer_is_no_answer_is_right(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="the run ends here, after 0 steps"):
        _, final = trained(tmp_path / "run", images(tolerance=1e-30))
    assert (final["test_accuracy"], final["diverged"]) == (0.0, True)

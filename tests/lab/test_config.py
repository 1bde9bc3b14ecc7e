"""Configurations: what is wrong is named by its key."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.lab.small import OPTIMIZERS, small_run, small_table

from ocnopt.lab import toml
from ocnopt.lab.config import parse_run, read_run
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.settings import Settings, parse_assignment, parse_spec

Change = Callable[[dict[str, Any]], Any]


def put(section: str, **values: Any) -> Change:
    return lambda table: table[section].update(values)


WRONG: list[tuple[Change, str]] = [
    (lambda t: t.update(trainig={}), "trainig is not known: did you mean training?"),
    (lambda t: t.update(data=3), "data must be a table, got 3"),
    (lambda t: t.update(label=3), "label must be a text, got 3"),
    (put("data", batchsize=3), "data.batchsize is not known: did you mean batch_size?"),
    (put("data", batch_size=0), "data.batch_size must be a whole number ≥ 1, got 0"),
    (put("data", batch_size=8.0), "data.batch_size must be a whole number ≥ 1, got 8.0"),
    (put("data", batch_size=True), "data.batch_size must be a whole number ≥ 1, got True"),
    (put("data", train_limit="all"), "data.train_limit must be a whole number ≥ 1, got 'all'"),
    (put("data", validation=1.0), "data.validation must be a number in [0, 1), got 1.0"),
    (put("data", validation=float("nan")), "data.validation must be a number in [0, 1), got nan"),
    (put("data", drop_last=1), "data.drop_last must be true or false, got 1"),
    (lambda t: t["data"].pop("name"), "data.name is missing: it must be a text"),
    (put("data", name="MMIST"), "data.name: There is no dataset named 'MMIST'"),
    (put("data", name="Circle"), "data.name: Circle has no classes, and fcn classifies"),
    (put("data", name="Genesis"), "network.name must be gpt for text, got 'fcn'"),
    (put("data", block_length=8), "data.block_length is for text, and WINE is none"),
    (put("data", name="Genesis", block_length=0), "data.block_length must be a whole number ≥ 1, got 0"),
    (lambda t: t.update(network={"name": "gpt"}), "network.name: gpt reads text, and WINE is none"),
    (put("network", name="mlp"), "network.name must be one of fcn, cnn"),
    (put("network", widht=3), "network.widht is not known: did you mean width?"),
    (put("network", width="3"), "network.width must be a whole number, got '3'"),
    (put("training", epochs=0), "training.epochs must be a whole number ≥ 1, got 0"),
    (put("training", seed=-1), "training.seed must be a whole number ≥ 0, got -1"),
    (put("training", schedule="step"), "training.schedule must be 'constant' or 'cosine', got 'step'"),
    (lambda t: t.pop("optimizer"), "optimizer.name must be one of sgdm, "),
    (put("optimizer", name="lion"), "optimizer.name must be one of sgdm, "),
    (put("optimizer", name="sgdm", beta1=0.9), "optimizer.beta1 is not known: known are lr, momentum"),
    (put("optimizer", name="sgdm", lr="fast"), "optimizer.lr must be a number > 0, got 'fast'"),
    (put("optimizer", name="sgdm", lr=0), "optimizer.lr must be a number > 0, got 0"),
    (put("optimizer", name="sgdm", momentum=1), "optimizer.momentum must be a number in [0, 1), got 1"),
    (put("optimizer", name="adam", beta2=1.0), "optimizer.beta2 must be a number in [0, 1), got 1.0"),
    (put("optimizer", name="muon", weight_decay=-1), "optimizer.weight_decay must be a number ≥ 0, got -1"),
    (put("optimizer", name="ocnopt", momentum=1.0), "optimizer.momentum must be a number in [0, 1), got 1.0"),
    (put("optimizer", name="ocnopt", rank="half"), "optimizer.rank must be a whole number ≥ 1 or 'full', got 'half'"),
    (put("optimizer", name="ocnopt", curvature="hessian"), "optimizer.curvature must be one of 'identity', "),
    (put("optimizer", name="ocnopt", nesterov=True), "optimizer.nesterov=True is heavy-ball momentum"),
    (put("optimizer", name="ocnopt", maximize=True), "optimizer.maximize is not known"),
    (put("optimizer", name="ekfac", damping=0.0), "optimizer.damping must be positive; got 0.0"),
    (put("optimizer", name="emsa", lr=2.0), "optimizer.lr must be in (0, 1]; got 2.0"),
    (put("optimizer", name="ddp", mu_factor=1.0), "optimizer.mu_factor must be greater than 1; got 1.0"),
    (put("optimizer", name="ddp", max_size=2.5), "optimizer.max_size must be a whole number, got 2.5"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_named(change: Change, message: str) -> None:
    table = small_table({"name": "sgdm"})
    parse_run(table)
    change(table)
    with pytest.raises(ConfigError) as caught:
        parse_run(table)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[data]\nname = 'WINE'\nbatch = 3\n", "data.batch"),
        ("[data]\nname = \n", "this is not TOML: Invalid value (at line 2, column 8)"),
        (None, "there is no such file"),
    ],
)
def test_the_file_is_named_too(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_text("[network]\nname = 'fcn'\n[optimizer]\nname = 'adam'\n" * (message == "data.batch") + content)
    with pytest.raises(ConfigError) as caught:
        read_run(path)
    assert str(caught.value).startswith(f"{path}: {message}")


@pytest.mark.parametrize("key", OPTIMIZERS)
def test_a_configuration_survives_its_file(key: str, tmp_path: Path) -> None:
    config = small_run(OPTIMIZERS[key], schedule="cosine", seed=7)
    (tmp_path / "config.toml").write_text(toml.dumps(config.table()))
    assert read_run(tmp_path / "config.toml") == config


def test_every_option_of_the_optimizer_is_written_down() -> None:
    written = tomllib.loads(toml.dumps(small_run({"name": "ocnopt", "rank": 3}).table()))["optimizer"]
    assert written["rank"] == 3
    assert {"curvature", "feedback", "gauss_newton", "clamp", "decay", "refresh_every", "lr"} <= set(written)


def test_names_are_those_of_the_paper_in_any_case() -> None:
    table = small_table()
    table["data"]["name"] = "fashionmnist"
    assert parse_run(table).data.name == "FMNIST"


def test_the_label_says_what_is_not_a_default_except_the_learning_rate() -> None:
    assert small_run({"name": "ocnopt", "lr": 0.7}).label == "OCNOpt"
    assert small_run({"name": "ocnopt", "lr": 0.7, "rank": 4, "clamp": True}).label == "OCNOpt rank=4"
    assert parse_run({**small_table(), "label": "mine"}).label == "mine"


# --- the command line ---


def test_options_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(toml.dumps(small_table({"name": "ocnopt", "lr": 0.5, "rank": 2}, seed=1)))
    same = Settings(str(path)).run()
    assert (same.optimizer.options["rank"], same.training.seed, same.network.options["width"]) == (2, 1, 6)
    other = Settings(
        str(path), batch_size=4, epochs=9, seed=3, lr=0.25, overrides=("data.test_limit=5", "network.activation=relu")
    ).run()
    assert (other.data.batch_size, other.data.test_limit) == (4, 5)
    assert (other.training.epochs, other.training.seed, other.training.log_every) == (9, 3, 1)
    assert (other.optimizer.lr, other.optimizer.options["rank"]) == (0.25, 2)
    assert other.network.options == {"width": 6, "depth": 3, "activation": "relu"}


def test_another_optimizer_or_network_starts_from_its_own_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(toml.dumps({**small_table({"name": "ocnopt", "lr": 0.5}), "label": "old"}))
    adam = Settings(str(path), optimizer="adam:beta1=0.8", network="cnn").run()
    assert (adam.label, adam.optimizer.lr, adam.optimizer.options["beta1"]) == ("Adam beta1=0.8", 1e-3, 0.8)
    assert dict(adam.network.options) == {}
    changed = Settings(str(path), optimizer="ocnopt:rank=2").run()
    assert (changed.label, changed.optimizer.lr, changed.optimizer.options["rank"]) == ("OCNOpt rank=2", 0.5, 2)


def test_a_dataset_is_enough() -> None:
    run = Settings(dataset="digits").run()
    assert (run.data.name, run.network.name, run.optimizer.name) == ("DIGITS", "fcn", "ocnopt")
    with pytest.raises(ConfigError, match="--dataset"):
        Settings().run()


def test_values_on_the_command_line_have_types() -> None:
    assert parse_spec("ocnopt:rank=4,lr=1e-2,clamp=false,feedback=off") == {
        "name": "ocnopt",
        "rank": 4,
        "lr": 0.01,
        "clamp": False,
        "feedback": "off",
    }
    assert parse_assignment("data.name = WINE") == (("data", "name"), "WINE")
    for wrong in ("epochs", "=3", "data.=3"):
        with pytest.raises(ConfigError, match="key=value"):
            parse_assignment(wrong)

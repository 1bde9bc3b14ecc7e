"""``ocnopt sweep`` as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.lab.sweep.recipes import TABLE
from typer.testing import CliRunner

from ocnopt.lab.cli import make_app
from ocnopt.lab.sweep import Board
from ocnopt.lab.toml import dumps


def sweep(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(make_app(), ["sweep", *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(dumps({**TABLE, "training": {"epochs": 1}, "grids": {"sgdm": {"lr": [0.01, 0.1]}}}))
    return str(path)


def test_sweep_and_again(recipe: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    status, text, _ = sweep(recipe, "--out", out, "--device", "cpu", "--json")
    assert status == 0
    found = json.loads(text)
    (line,) = found["lines"]
    assert (line["grid"], line["points"], line["done"], line["failed"], line["paper"]) == ("sgdm", 2, 2, 0, 94.35)
    assert found["runs"] == out
    assert (tmp_path / "out" / "sweep.db").is_file()
    status, text, _ = sweep(recipe, "--out", out, "--device", "cpu", "--seeds", "2", "--json")
    (again,) = json.loads(text)["lines"]
    assert (again["points"], again["done"], again["best"]["seeds"]) == (4, 4, 2)
    status, text, _ = sweep(recipe, "--out", out, "--device", "cpu")
    assert "SGDm" in text
    assert "94.35" in text


@pytest.mark.slow
def test_every_process_of_torchrun_is_a_worker(recipe: str, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["-m", "ocnopt.lab", "sweep", recipe, "--seeds", "3", "--device", "cpu", "--json"]
    command = [*launcher, *arguments, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (line,) = json.loads(done.stdout)["lines"]  # one document, from one of them
    assert (line["points"], line["done"]) == (6, 6)
    board = Board(str(tmp_path / "out" / "sweep.db"), "small")
    assert len({trial.user_attrs["worker"] for trial in board.trials()}) == 2
    board.close()


def test_failures_are_shown_and_set_the_exit_status(tmp_path: Path) -> None:
    recipe = tmp_path / "small.toml"
    recipe.write_text(dumps({**TABLE, "grids": {"ddp": {"max_size": [2, 3]}}, "paper": {}}))
    status, text, _ = sweep(str(recipe), "--out", str(tmp_path), "--device", "cpu", "--json")
    (line,) = json.loads(text)["lines"]
    assert status == 1
    assert line["failed"] == 2
    assert "max_size" in line["errors"][0]


def test_missing_data_is_one_sentence_and_not_a_failure_of_every_trial(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("OCNOPT_DATA", "OCNOPT_CACHE"):  # wherever the data may be at hand, here it is not
        monkeypatch.setenv(place, str(tmp_path / "nothing"))
    Path(recipe).write_text(Path(recipe).read_text().replace("WINE", "MNIST"))
    status, _, errors = sweep(recipe, "--out", str(tmp_path / "out"), "--device", "cpu", "--no-download")
    assert status == 1
    assert errors.startswith("error: MNIST was not found in ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--storage", "mysql://host/db"], "--storage must be a SQLite file or a PostgreSQL database"),
        (["--grid", "adam"], "grids.adam is not in the recipe"),
        (["--storage", "postgresql://127.0.0.1:1/db?connect_timeout=2"], "--storage: the database does not answer"),
        (["--device", "tpu7"], "device must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str, recipe: str, tmp_path: Path) -> None:
    status, _, errors = sweep(recipe, "--out", str(tmp_path / "out"), *arguments)
    assert status == 2
    assert sentence in " ".join(errors.split())
    assert "Traceback" not in errors

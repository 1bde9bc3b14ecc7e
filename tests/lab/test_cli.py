"""The command ``ocnopt``, as a user types it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import requests
import typer
import urllib3
from rich.console import Console
from tests.lab.data.writers import write_idx_set
from typer.testing import CliRunner, Result

from ocnopt.lab.cli import main, make_app, shared
from ocnopt.lab.data import NAMES
from ocnopt.lab.runs import RunFolder, find_runs

QUICK = ("--dataset", "WINE", "--epochs", "1")


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    return make_app()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, and nobody's data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OCNOPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OCNOPT_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(requests, "get", offline)
    return tmp_path


def offline(url: str, **_: Any) -> requests.Response:
    reason = urllib3.exceptions.NewConnectionError(None, "no network")  # type: ignore[arg-type]
    raise requests.ConnectionError(urllib3.exceptions.MaxRetryError(None, url, reason))  # type: ignore[arg-type]


class Ocnopt:
    def __init__(self, app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._app, self._patch = app, monkeypatch

    def __call__(self, *arguments: str, code: int = 0) -> Result:
        # not "file": to put that back would tie the console to the stderr of this test
        self._patch.setattr(shared.progress_console, "_file", None)
        result = CliRunner().invoke(self._app, list(arguments))
        assert result.exit_code == code, result.output
        return result

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code).stdout)


@pytest.fixture
def ocnopt(app: typer.Typer, monkeypatch: pytest.MonkeyPatch) -> Ocnopt:
    return Ocnopt(app, monkeypatch)


# --- help ---


@pytest.mark.parametrize("command", ["demo", "train", "compare", "report", "data list", "data fetch", "data check"])
def test_help_has_examples_that_fit_into_a_terminal(ocnopt: Ocnopt, command: str) -> None:
    text = ocnopt(*command.split(), "--help").stdout
    lines = [line.strip() for line in text.splitlines()]
    examples = [line for line in lines if line.startswith(f"ocnopt {command}")]
    assert "Examples" in lines
    assert examples
    assert "--json" in text
    for option in () if command.split()[0] in ("report", "data") else ("--seed", "--device"):
        assert option in text


def test_help_lists_the_commands(ocnopt: Ocnopt) -> None:
    text = ocnopt("--help").stdout
    for command in ("demo", "train", "compare", "bench", "report", "data"):
        assert f" {command} " in text


def test_without_the_lab_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "typer", None)
    with pytest.raises(SystemExit, match=r"typer is missing; .* pip install 'ocnopt\[lab\]'"):
        main()


# --- train ---


def test_train_writes_a_run_and_says_where(ocnopt: Ocnopt, here: Path) -> None:
    result = ocnopt("train", *QUICK, "--optimizer", "ocnopt:rank=2", "--seed", "4")
    (folder,) = find_runs([here / "runs"])
    assert "WINE, fcn, OCNOpt rank=2, lr 0.01, seed 4: test accuracy" in result.stdout
    assert str(folder.path.relative_to(here)) in result.stdout
    assert result.stderr == ""  # no progress bar where there is no terminal
    assert folder.config()["optimizer"]["rank"] == 2
    assert folder.final() is not None


def test_train_prints_json_and_nothing_else(ocnopt: Ocnopt) -> None:
    document = ocnopt.json("train", *QUICK, "--lr", "0.5", "--set", "network.width=4", "--out", "here")
    assert document["run"] == "here"
    assert document["config"]["network"] == {"name": "fcn", "width": 4}
    assert document["config"]["optimizer"]["lr"] == 0.5
    assert document["final"] == RunFolder("here").final()


def test_train_takes_a_recipe_by_name(ocnopt: Ocnopt) -> None:
    document = ocnopt.json("train", "table1-fcn-wine", "--epochs", "1")
    assert document["config"]["optimizer"]["feedback"] == "nonlinear"


def test_train_resumes(ocnopt: Ocnopt) -> None:
    first = ocnopt.json("train", *QUICK, "--out", "run")
    again = ocnopt.json("train", "--resume", "run")
    assert again["final"] == first["final"]


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        ((), "name a configuration file, a recipe, or a dataset with --dataset", 2),
        (("--dataset", "WINES"), "data.name: There is no dataset named 'WINES'", 2),
        (("nowhere.toml",), "nowhere.toml: there is no such file", 2),
        ((*QUICK, "--optimizer", "lion"), "optimizer.name must be one of", 2),
        ((*QUICK, "--set", "training.epoch=3"), "training.epoch is not known: did you mean epochs?", 2),
        ((*QUICK, "--set", "oops"), "write key=value, not 'oops'", 2),
        ((*QUICK, "--device", "gpu"), "device must be auto, cpu, cuda or cuda:N, got 'gpu'", 2),
        ((*QUICK, "--device", "meta"), "device must be auto, cpu, cuda or cuda:N, got 'meta'", 2),
        ((*QUICK, "--set", "data.validation=0.001"), "data.validation: fraction 0.001 of 142 samples leaves", 2),
        ((*QUICK, "--set", "data.drop_last=true", "--batch-size", "200"), "data.batch_size 200 leaves no batch of", 2),
        (("--dataset", "DIGITS", "--network", "cnn", "--optimizer", "ddp"), "optimizer DDP: model must have no", 2),
        ((*QUICK, "--network", "cnn"), "network.input_shape must be (channels, height, width)", 2),
        (("--dataset", "MNIST", "--no-download"), "MNIST was not found in", 1),
        (("--dataset", "MNIST"), "MNIST was not found in", 1),
        (("--resume", "nowhere"), "nowhere holds no run", 1),
        ((*QUICK, "--resume", "nowhere"), "--resume goes on with the run as it is", 2),
    ],
)
def test_what_is_wrong_is_one_sentence(ocnopt: Ocnopt, arguments: tuple[str, ...], message: str, code: int) -> None:
    result = ocnopt("train", *arguments, code=code)
    assert result.stderr.startswith(f"error: {message}")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""
    assert not Path("runs").exists()  # nothing is left behind


def test_an_empty_checkpoint_is_one_sentence(ocnopt: Ocnopt) -> None:
    ocnopt("train", *QUICK, "--out", "run")
    run = RunFolder("run")
    run.metrics_path.write_bytes(run.metrics_path.read_bytes().rpartition(b'{"kind":"final"')[0])
    run.checkpoint_path.write_bytes(b"")
    result = ocnopt("train", "--resume", "run", code=1)
    assert result.stderr.startswith("error: run/checkpoint.pt is damaged: ")


def test_a_run_goes_on_with_its_own_data_only(ocnopt: Ocnopt) -> None:
    ocnopt("train", *QUICK, "--out", "run")
    run = RunFolder("run")
    run.metrics_path.write_bytes(run.metrics_path.read_bytes().rpartition(b'{"kind":"final"')[0])
    run.config_path.write_text(run.config_path.read_text().replace("[data]", "[data]\ntrain_limit = 50"))
    result = ocnopt("train", "--resume", "run", code=1)
    assert "error: run cannot be continued here: samples is 50 here but 142 in the saved state" in result.stderr


@pytest.mark.parametrize("command", ["compare", "demo"])
def test_commands_with_processes_of_their_own_refuse_torchrun(
    ocnopt: Ocnopt, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    result = ocnopt(command, "--dataset", "WINE", code=2)
    assert result.stderr.startswith(f"error: {command} is started without torchrun")
    assert not Path("runs").exists()


def test_a_device_that_is_not_there_is_named(ocnopt: Ocnopt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    result = ocnopt("train", *QUICK, "--device", "cuda:2", code=2)
    assert "device cuda:2 was asked for, but the last one that torch sees is cuda:1" in result.stderr


def test_a_folder_with_a_run_is_not_overwritten(ocnopt: Ocnopt) -> None:
    ocnopt("train", *QUICK, "--out", "run")
    before = RunFolder("run").metrics_path.read_bytes()
    result = ocnopt("train", *QUICK, "--out", "run", code=1)
    assert "run holds a run already" in result.stderr
    assert RunFolder("run").metrics_path.read_bytes() == before


# --- compare and report ---

TWO = ("--optimizer", "adam", "--optimizer", "ocnopt:rank=2", "--lr", "0.01", "--lr", "0.1", "--seeds", "2")


def test_compare_puts_optimizers_rates_and_seeds_side_by_side(ocnopt: Ocnopt) -> None:
    document = ocnopt.json("compare", *QUICK, *TWO, "--seed", "7", "--workers", "1", "--out", "all")
    assert [(row["label"], row["lr"], row["runs"]) for row in document["rows"]] == [
        ("Adam", 0.01, 2),
        ("Adam", 0.1, 2),
        ("OCNOpt rank=2", 0.01, 2),
        ("OCNOpt rank=2", 0.1, 2),
    ]
    folders = [RunFolder(path) for path in document["runs"]]
    assert {folder.config()["training"]["seed"] for folder in folders} == {7, 8}
    accuracies = [folder.metrics("final")[0]["test_accuracy"] for folder in folders[:2]]
    spread = document["rows"][0]["test_accuracy"]
    assert spread["mean"] == pytest.approx(sum(accuracies) / 2)
    assert spread["deviation"] == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2**0.5)
    assert document["failed"] == {}
    assert Path(document["report"]).read_text().startswith("<!")


def test_compare_takes_the_optimizers_of_a_recipe(ocnopt: Ocnopt) -> None:
    document = ocnopt.json("compare", "table1-fcn-wine", "--epochs", "1", "--seeds", "1", "--workers", "1")
    labels = [row["label"] for row in document["rows"]]
    assert labels[:3] == ["OCNOpt feedback=nonlinear", "SGDm", "RMSprop"]
    assert sorted(labels[3:]) == ["Adam", "AdamW", "DDP", "E-MSA", "EKFAC", "Muon", "OCNOpt"]
    (own,) = (RunFolder(path) for path in document["runs"] if "nonlinear" in path)
    assert (own.config()["optimizer"]["feedback"], own.config()["data"]["batch_size"]) == ("nonlinear", 8)


def test_compare_counts_an_optimizer_once_where_rates_are_given(ocnopt: Ocnopt) -> None:
    Path("own.toml").write_text(
        "[data]\nname = 'WINE'\n[network]\nname = 'fcn'\n[optimizer]\nname = 'ocnopt'\nrank = 2\nlr = 0.5\n"
        "[training]\nepochs = 1\n[grids.ocnopt]\nrank = 2\nlr = [0.01, 0.1]\n[grids.emsa]\nlr = [0.1, 0.2]\n"
    )
    quick = ("compare", "own.toml", "--seeds", "1", "--workers", "1")
    assert [(row["label"], row["lr"]) for row in ocnopt.json(*quick, "--lr", "0.2")["rows"]] == [
        ("OCNOpt rank=2", 0.2),
        ("E-MSA", 0.2),
    ]
    own = [(row["label"], row["lr"]) for row in ocnopt.json(*quick)["rows"]]
    assert own[:2] == [("OCNOpt rank=2", 0.5), ("OCNOpt rank=2", 0.01)]


def test_compare_keeps_what_is_said_of_the_optimizer_of_the_run(ocnopt: Ocnopt) -> None:
    quick = (*QUICK, "--seeds", "1", "--workers", "1")
    document = ocnopt.json("compare", *quick, "--set", "optimizer.rank=3")
    assert [row["label"] for row in document["rows"]][:2] == ["OCNOpt rank=3", "OCNOpt"]
    result = ocnopt("compare", *quick, "--optimizer", "adam", "--set", "optimizer.rank=3", code=2)
    assert "write --optimizer NAME:KEY=VALUE" in result.stderr


def test_compare_holds_out_samples_to_choose_a_learning_rate_by(ocnopt: Ocnopt) -> None:
    quick = (*QUICK, "--seeds", "1", "--workers", "1", "--optimizer", "adam")
    for arguments, fraction in (
        (("--lr", "0.1"), 0.0),
        (("--lr", "0.1", "--lr", "0.2"), 0.1),
        (("--lr", "0.1", "--lr", "0.2", "--set", "data.validation=0.3"), 0.3),
    ):
        document = ocnopt.json("compare", *quick, *arguments)
        assert {RunFolder(path).config()["data"]["validation"] for path in document["runs"]} == {fraction}
    assert "best mean validation accuracy" in Path(document["report"]).read_text()


def test_compare_says_which_optimizer_a_learning_rate_is_not_for(ocnopt: Ocnopt) -> None:
    arguments = ("--optimizer", "adam", "--optimizer", "emsa", "--lr", "3")
    assert "error: emsa.lr must be in (0, 1]" in ocnopt("compare", *QUICK, *arguments, code=2).stderr


def test_compare_prints_a_table_and_lines_where_there_is_no_terminal(ocnopt: Ocnopt) -> None:
    result = ocnopt("compare", *QUICK, "--optimizer", "adam", "--seeds", "2", "--workers", "1", "--out", "all")
    assert "WINE, fcn, batch size 32, epochs: 1" in result.stdout
    assert "Adam" in result.stdout
    assert "±" in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert result.stderr.count("WINE, fcn, Adam, lr 0.001, seed") == 2


def test_compare_goes_on_with_what_is_not_finished(ocnopt: Ocnopt) -> None:
    whole = ocnopt.json("compare", *QUICK, *TWO, "--workers", "1", "--out", "all")
    lost = RunFolder(whole["runs"][3])
    for path in (lost.metrics_path, lost.checkpoint_path):
        path.unlink()
    again = ocnopt.json("compare", "--resume", "all", "--workers", "1")
    kept = [{**row, "seconds": None} for row in whole["rows"]]
    assert [{**row, "seconds": None} for row in again["rows"]] == kept
    assert lost.final() is not None


def test_compare_needs_something_to_resume(ocnopt: Ocnopt) -> None:
    Path("empty").mkdir()
    assert "there is no run in empty" in ocnopt("compare", "--resume", "empty", code=1).stderr
    assert "leave out what" in ocnopt("compare", *QUICK, "--resume", "empty", code=2).stderr


def test_a_run_that_fails_stops_no_other(ocnopt: Ocnopt) -> None:
    arguments = ("--optimizer", "adam", "--optimizer", "ddp:max_size=2", "--seeds", "1", "--workers", "1")
    document = ocnopt.json("compare", *QUICK, *arguments, "--out", "all", code=1)
    ((path, error),) = document["failed"].items()
    assert "DDP" in path
    assert "max_size" in error
    assert "Traceback" in (Path(path) / "error.txt").read_text()
    assert [(row["label"], row["finished"]) for row in document["rows"]] == [("Adam", 1), ("DDP max_size=2", 0)]


def test_compare_names_the_optimizer_that_cannot_train_the_network(ocnopt: Ocnopt) -> None:
    arguments = ("--dataset", "DIGITS", "--network", "cnn", "--optimizer", "adam", "--optimizer", "ddp")
    assert "error: optimizer DDP: model must have no" in ocnopt("compare", *arguments, code=2).stderr
    assert not Path("runs").exists()


def test_compare_that_is_ended_ends_its_workers(here: Path) -> None:
    """SIGTERM reaches the parent alone, unlike Ctrl-C."""
    arguments = ["--dataset", "DIGITS", "--optimizer", "sgdm", "--epochs", "10000", "--workers", "2", "--out", "all"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ocnopt.lab", "compare", *arguments], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 180  # a busy machine takes its time
    while len(list(here.glob("all/*/checkpoint.pt"))) < 2:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    _, errors = process.communicate(timeout=30)  # the pipe ends with the last process that holds it
    assert process.returncode == 130
    assert errors.strip().endswith("error: stopped")  # and nothing of leaked semaphores


def test_compare_refuses_the_same_run_twice(ocnopt: Ocnopt) -> None:
    result = ocnopt("compare", *QUICK, "--optimizer", "adam", "--optimizer", "adam", code=2)
    assert "two of the runs are the same: WINE-fcn-Adam" in result.stderr


def test_the_live_table_shows_how_far_the_runs_are(ocnopt: Ocnopt) -> None:
    ocnopt("compare", *QUICK, "--optimizer", "adam", "--seeds", "1", "--workers", "1", "--out", "all")
    from ocnopt.lab.config import read_run
    from ocnopt.lab.live import Board

    (folder,) = find_runs(["all"])
    board = Board({folder: read_run(folder.config_path)})

    def shown() -> str:
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(board.render())
        return console.export_text()

    assert "0 of 1 runs" in shown()
    board.note(folder, {"kind": "begin", "step": 0, "steps": 10})
    board.note(folder, {"kind": "step", "step": 5})
    assert "50%" in shown()
    board.note(folder, {"kind": "final", "test_accuracy": 0.75, "train_loss": 1, "seconds": 2, "diverged": False})
    assert "75.00" in shown()
    assert "100%" in shown()


def test_report_reads_runs_that_are_not_finished(ocnopt: Ocnopt) -> None:
    ocnopt("train", *QUICK, "--out", "runs/a")
    ocnopt("train", *QUICK, "--out", "runs/b", "--seed", "1")
    final = RunFolder("runs/b").metrics_path
    final.write_bytes(final.read_bytes()[:-5])
    document = ocnopt.json("report", "runs", "--out", "page.html")
    (row,) = document["rows"]
    assert (row["runs"], row["finished"]) == (2, 1)
    assert Path("page.html").is_file()
    Path("empty").mkdir()
    assert "there is no run in empty" in ocnopt("report", "empty", code=1).stderr
    assert "there is no folder nowhere" in ocnopt("report", "nowhere", code=1).stderr


def test_report_shows_how_far_it_is(ocnopt: Ocnopt, monkeypatch: pytest.MonkeyPatch) -> None:
    ocnopt("train", *QUICK, "--out", "runs/a")
    monkeypatch.setattr(shared, "progress_console", Console(stderr=True, force_terminal=True, width=80))
    shown = ocnopt("report", "runs").stderr
    assert "reading" in shown
    assert "drawing" in shown
    assert "100%" in shown


def test_a_part_of_the_data_is_never_taken_for_the_whole(ocnopt: Ocnopt, here: Path) -> None:
    write_idx_set(here / "files" / "mnist")
    mnist = ("--dataset", "MNIST", "--data-dir", str(here / "files"), "--epochs", "1")
    note = "20 train, 10 test instead of the 60,000 train, 10,000 test of the published set."
    document = ocnopt.json("train", *mnist, "--out", "runs/a")
    counts = {"train": 20, "validation": 0, "test": 10, "subset": True, "notes": [note]}
    assert document["data"] == {**counts, "source": str(here / "files" / "mnist")}
    assert RunFolder("runs/a").environment()["data"] == document["data"]
    assert f"MNIST: {note}\n" in ocnopt("train", *mnist, "--out", "runs/b", "--seed", "1").stdout
    assert note in ocnopt("report", "runs").stdout.replace("\n", " ").replace("  ", " ")
    assert note in Path("report.html").read_text()
    ocnopt("train", *QUICK, "--out", "wine")
    assert "No official split" not in ocnopt("report", "wine").stdout  # a remark, and nothing left out


# --- data ---


def test_data_list_shows_every_dataset(ocnopt: Ocnopt) -> None:
    rows = ocnopt.json("data", "list")
    status = {row["name"]: row["status"] for row in rows}
    assert (status["WINE"], status["MNIST"], tuple(status)) == ("built in", "missing", NAMES)
    table = ocnopt("data", "list").stdout
    assert all(f" {name} " in table for name in NAMES)
    assert all(len(line) <= 80 for line in table.splitlines())


def test_data_list_marks_files_that_may_hold_less(ocnopt: Ocnopt, here: Path) -> None:
    (here / "cifar-10-python-subset.tar.xz").touch()
    table = ocnopt("data", "list", "--data-dir", str(here)).stdout
    assert f"\nCIFAR10: {here} *\n* These are not the official files, and may hold fewer samples" in table
    assert table.count("found *") == 1


def test_data_check_says_what_is_missing(ocnopt: Ocnopt) -> None:
    assert [row["status"] for row in ocnopt.json("data", "check", "wine")] == ["complete"]
    wine, mnist = ocnopt.json("data", "check", "wine", "mnist", code=1)
    assert (wine["status"], mnist["status"]) == ("complete", "missing")
    text = ocnopt("data", "check", "wine", "mnist", code=1).stdout
    assert mnist["message"] in text.splitlines()  # whole, however narrow the terminal
    assert "WINE (scikit-learn): No official split" in text
    assert "There is no dataset named 'x'" in ocnopt("data", "check", "x", code=2).stderr


def test_data_is_downloaded_when_it_is_not_there_unless_somebody_objects(
    ocnopt: Ocnopt, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(requests, "get", lambda url, **options: asked.append(url) or offline(url))
    sentence = ocnopt("train", "--dataset", "MNIST", "--no-download", code=1).stderr
    assert asked == []
    assert "could not be downloaded" not in sentence
    for command in (["train", "--dataset", "MNIST"], ["compare", "--dataset", "MNIST"], ["sweep", "table1-fcn-mnist"]):
        sentence = ocnopt(*command, code=1).stderr
        assert len(sentence.splitlines()) == 1
        assert "mnist/train-images-idx3-ubyte.gz could not be downloaded: the server cannot be reached" in sentence
        assert len(asked) == 2  # the official address and its mirror, once each
        asked.clear()
    assert not Path("runs").exists()


def test_data_fetch_leaves_alone_what_is_built_in(ocnopt: Ocnopt) -> None:
    (row,) = ocnopt.json("data", "fetch", "WINE")
    assert row["status"] == "built in"


# --- demo ---


def test_demo_compares_every_optimizer_and_writes_a_report(ocnopt: Ocnopt) -> None:
    """With two real worker processes, as it runs without arguments."""
    result = ocnopt("demo", "--dataset", "wine", "--seeds", "2", "--epochs", "1", "--workers", "2", "--out", "demo")
    labels = ("OCNOpt", "OCNOpt kronecker", "SGDm", "RMSprop", "Adam", "AdamW", "Muon", "EKFAC", "E-MSA", "DDP")
    places = [result.stdout.find(f"  {label} ") for label in labels]
    assert -1 not in places
    assert places == sorted(places)
    assert result.stdout.count("±") >= 20
    assert Path("demo/report.html").read_text().startswith("<!")
    assert len(find_runs(["demo"])) == 40


def test_tables_without_a_terminal_are_as_wide_as_need_be(ocnopt: Ocnopt, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = ocnopt("data", "list").stdout.splitlines()
    assert max(map(len, narrow)) <= 80
    monkeypatch.delenv("COLUMNS")
    wide = ocnopt("data", "list").stdout.splitlines()
    assert len(wide) < len(narrow)
    assert 80 < max(map(len, wide)) <= 160
    monkeypatch.setattr(shared, "_is_terminal", lambda stream: stream == 2)  # as with `ocnopt data list | less`
    assert ocnopt("data", "list").stdout.splitlines() == narrow

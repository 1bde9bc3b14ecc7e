"""The commands: ``ocnopt bench`` and ``python -m ocnopt.lab.bench``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ocnopt.lab.bench import networks
from ocnopt.lab.bench.__main__ import main
from ocnopt.lab.bench.networks import Network
from ocnopt.lab.cli import make_app, shared

TINY = Network("fcn", (6,), 3, {"depth": 3, "width": 4}, {"depth": ("depth", (2, 3, 4, 5))})
SMALL = ["--network", "fcn", "--batch", "8", "--rounds", "2", "--no-memory", "--device", "cpu"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(networks.NETWORKS, "fcn", TINY)


def test_the_plain_command_needs_little_more_than_torch() -> None:
    """And torchdiffeq. Typer, rich and matplotlib are not where it runs: they cannot even be imported."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(['typer', 'rich', 'matplotlib', 'optuna', 'requests']))"
    code = f"{blocked}; from ocnopt.lab.bench.__main__ import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, *SMALL, "--optimizer", "sgd"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| Adam (fused) |" in done.stdout


def test_the_plain_command_writes_a_file_and_names_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--optimizer", "identity-linear-1", "--json", str(tmp_path / "a.json")]) == 0
    assert len(json.loads((tmp_path / "a.json").read_text())["results"]) == 3
    assert main([*SMALL, "--optimizer", "nobody"]) == 2
    assert "got 'nobody'" in capsys.readouterr().err


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(shared.progress_console, "_file", None)
    return make_app()


def test_ocnopt_bench_draws_and_tells(app: typer.Typer, tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    words = ["bench", *SMALL, "--batch", "16", "--optimizer", "kronecker-linear-1", *files]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "OCNOpt kronecker, linear r=1" in done.stdout
    assert "refreshes every 100 steps" in done.stdout
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert {row["batch"] for row in json.loads((tmp_path / "b.json").read_text())["results"]} == {8, 16}


def test_help_has_examples(app: typer.Typer) -> None:
    text = CliRunner().invoke(app, ["bench", "--help"]).stdout
    assert "Examples" in text
    assert "ocnopt bench --plot complexity.png" in text


def test_ocnopt_bench_draws_growth(app: typer.Typer, tmp_path: Path) -> None:
    words = ["bench", *SMALL, "--growth", "depth", "--optimizer", "sgd", "--plot", str(tmp_path / "g.png")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "growth with the depth" in done.stdout
    assert (tmp_path / "g.png").exists()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [(["--optimizer", "nobody"], "got 'nobody'"), (["--plot", "x.png"], "give --batch more than once")],
)
def test_ocnopt_bench_says_what_is_wrong(app: typer.Typer, more: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["bench", *SMALL, *more])
    assert done.exit_code == 2
    assert sentence in done.output


@pytest.mark.parametrize(
    ("option", "name", "sentence"),
    [
        ("--json", "file/a.json", "json: .*cannot be written: "),
        ("--json", ".", "json: .*cannot be written: Is a directory"),
        ("--plot", "file/a.png", "plot: .*cannot be written: "),
        ("--plot", "a.word", "plot must end in one of .*.png.* got .*a.word"),
    ],
)
def test_files_that_cannot_be_written_are_found_before_measuring(
    app: typer.Typer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, name: str, sentence: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("ocnopt.lab.cli.bench.measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr("ocnopt.lab.bench.__main__.measure", lambda *_: pytest.fail("measured"))
    words = [*SMALL, "--optimizer", "sgd", option, str(tmp_path / name)]
    done = CliRunner().invoke(app, ["bench", *words, "--batch", "16"])
    assert done.exit_code == 2
    assert re.search(sentence, done.output, re.DOTALL)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    if option == "--json":
        assert main(words) == 2

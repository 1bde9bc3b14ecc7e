"""Every experiment, cut down to seconds: what it runs, what it writes, and that it does not repeat itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ocnopt.lab.cli import make_app
from ocnopt.lab.config import parse_run
from ocnopt.lab.recipes import parse_recipe
from ocnopt.lab.reproduce import EXPERIMENTS, Bench, Finding, ablation, complexity, feedback, reproduce, robust, table1
from ocnopt.lab.reproduce.bench import markdown_table
from ocnopt.lab.reproduce.paper import TABLE1
from ocnopt.lab.runs import RunError, find_runs
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.sweep import Line
from ocnopt.lab.sweep.results import Setting

PNG = b"\x89PNG\r\n\x1a\n"


def check_folder(folder: Path, name: str, finding: Finding) -> dict[str, object]:
    document: dict[str, object] = json.loads((folder / f"{name}.json").read_text())
    page = (folder / f"{name}.md").read_text()
    assert document["scale"] == "quick"
    assert page.startswith(f"# {finding.title}\n\n- Scale: quick.")
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1
    for figure in finding.figures:
        assert (folder / figure).read_bytes().startswith(PNG)
        assert f"]({figure})" in page
    return document


def test_table1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table1.QUICK, "fcn-wine", table1.Quick(7, 32, left_out=("emsa", "ddp", "ekfac", "rmsprop")))
    few = {"sgdm": {"lr": [0.01, 0.1]}, "adam": {"lr": [0.001, 0.01, 0.1], "weight_decay": [0.0, 1e-3]}}
    monkeypatch.setattr(table1, "FCN_GRIDS", {**few, "ocnopt": {"curvature": ["adaptive", "kronecker"]}})
    lines: list[str] = []
    bench = Bench(tmp_path, only=("fcn-wine",), epochs=1, train_limit=100, tell=lines.append)
    finding = reproduce("table1", bench)
    check_folder(tmp_path, "table1", finding)
    (ours, paper) = finding.rows
    assert ours[:2] == ["WINE, fcn", "ours"]
    assert [cell == "–" for cell in ours[2:]] == [False, True, False, True, True, True, False]
    assert paper[2:] == ["94.35", "98.10", "98.13", "94.60", "93.56", "98.00", "**98.18**"]
    # one seed for each of the 2 + 6 + 2 settings, two more for the best of each of the three optimizers
    runs = find_runs([tmp_path / "fcn-wine" / "runs"])
    assert len(runs) == 10 + 2 * 3
    tables = [run.config() for run in runs]
    assert {(t["data"]["validation"], t["data"]["train_limit"], t["training"]["epochs"]) for t in tables} == {
        (0.2, 100, 1)
    }
    assert finding.setting[-1] == "fcn-wine: 100 training samples, 1 epochs, batch 32."
    assert lines[-1] == "fcn-wine: 9 of 9 runs"
    before = {run.path: run.metrics_path.stat().st_mtime_ns for run in runs}
    assert reproduce("table1", bench).rows == finding.rows
    assert {run.path: run.metrics_path.stat().st_mtime_ns for run in find_runs([tmp_path])} == before


@pytest.mark.parametrize("name", table1.QUICK_ROWS)
def test_the_ordinary_optimizers_have_as_many_settings(name: str, tmp_path: Path) -> None:
    row = next(row for row in TABLE1 if row.name == name)
    grids = parse_recipe(table1.recipe_of(row, Bench(tmp_path))).grids
    ordinary = ("sgdm", "rmsprop", "adam", "ekfac", "ocnopt")
    assert {len(grids[key]) for key in ordinary} == {12 if row.network == "fcn" else 5}
    assert row.curvature in grids["ocnopt"].choices["curvature"]
    assert table1.recipe_of(row, Bench(tmp_path, "full"))["grids"]["sgdm"]["lr"][0] == 3e-3  # the paper's


def test_rates_at_an_end_of_their_grid_are_named(tmp_path: Path) -> None:
    def line(grid: str, lr: float) -> Line:
        best = Setting("", {"lr": lr}, seeds=3, validation=1.0, test=1.0, test_deviation=0.0, seconds=1.0)
        return Line(grid, "", points=1, done=1, failed=0, best=best, paper=None, errors=[])

    found = {"fcn-wine": [line("sgdm", 0.3), line("adam", 1e-3), line("ekfac", 3e-4), line("ddp", 0.1)]}
    text = table1._at_an_end([TABLE1[0]], found, Bench(tmp_path))
    assert text == "Chosen learning rates at an end of their grid: SGDm on fcn-wine (0.3), EKFAC on fcn-wine (0.0003)."


def test_robust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(robust.CASES[0], quick_data={"train_limit": 64, "test_limit": 50}, quick_epochs=1)
    monkeypatch.setattr(robust, "CASES", (case,))
    finding = reproduce("robust", Bench(tmp_path))
    check_folder(tmp_path, "robust", finding)
    assert [row[1] for row in finding.rows] == list(robust.METHODS)
    rates = {run.config()["optimizer"]["lr"] for run in find_runs([tmp_path])}
    assert rates == {0.6}


def test_robust_has_the_learning_rates_of_the_paper() -> None:
    rates = {case.dataset: (case.network, case.lr) for case in robust.CASES}
    assert rates == {"DIGITS": ("fcn", 0.6), "MNIST": ("inception", 1.0), "SVHN": ("inception", 2.0)}


def test_ablation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "QUICK_ROWS", (("fcn", "WINE", 32, (), 1),))
    finding = reproduce("ablation", Bench(tmp_path))
    document = check_folder(tmp_path, "ablation", finding)
    cells = document["data"]
    assert isinstance(cells, list)
    assert [cell["baseline"] for cell in cells] == list(ablation.BASELINES)
    for cell in cells:
        differences = [on - off for off, on in zip(cell["off"], cell["on"], strict=True)]
        assert cell["difference"] == pytest.approx(sum(differences) / 3)
    # the two sides of a comparison differ in nothing but the feedback
    for seed in (0, 1, 2):
        lr = cells[0]["lr"]
        off, on = (
            next(
                config
                for run in find_runs([tmp_path])
                if (config := run.config())["label"] == f"SGD, feedback {feedback}"
                and (config["optimizer"]["lr"], config["training"]["seed"]) == (lr, seed)
            )
            for feedback in ("off", "nonlinear")
        )
        assert {key for key in off["optimizer"] if off["optimizer"][key] != on["optimizer"][key]} == {"feedback"}
        assert {key for key in off if off[key] != on[key]} == {"optimizer", "label"}


def test_complexity_measures_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = complexity.Panel("fcn", "MNIST", (1, 8, 8), 10, (8,))
    threads = torch.get_num_threads()
    small = complexity.measure(panel, "OCNOpt", 8, 2, "cpu")
    torch.set_num_threads(threads)
    assert small.seconds is not None
    assert 0 < small.seconds < 10
    held = torch.empty(0)

    def take_step(network: object, optimizer: object, x: object, y: object) -> None:
        nonlocal held
        held = torch.ones(50_000_000, dtype=torch.uint8)

    monkeypatch.setattr(complexity, "take_step", take_step)
    wasteful = complexity.measure(panel, "SGD", 8, 1, "cpu")
    torch.set_num_threads(threads)
    if wasteful.megabytes is not None:  # only Linux tells
        assert 40 < wasteful.megabytes < 200


def test_complexity_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(panel: complexity.Panel, method: str, size: int, steps: int, device: str) -> complexity.Cell:
        failed = (method, size) == ("E-MSA", 32)
        error = "out of memory" if failed else None
        return complexity.Cell(panel.network, method, size, None if failed else 1e-3 * size, None, error)

    monkeypatch.setattr(complexity, "_measure_apart", measure)
    finding = reproduce("complexity", Bench(tmp_path))
    check_folder(tmp_path, "complexity", finding)
    assert finding.rows[0][:3] == ["MNIST, cnn", "SGD", "4.0 ms, –"]
    assert finding.rows[3][-1] == "out of memory"


def test_complexity_panels_of_different_sizes_share_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(panel: complexity.Panel, method: str, size: int, steps: int, device: str) -> complexity.Cell:
        return complexity.Cell(panel.network, method, size, 1e-3 * size, 1.0)

    monkeypatch.setattr(complexity, "_measure_apart", measure)
    finding = reproduce("complexity", Bench(tmp_path, "full"))
    assert {len(row) for row in finding.rows} == {len(finding.headings)} == {2 + 7}
    assert [row[-1] for row in finding.rows if row[1] == "SGD"] == ["1024.0 ms, 1 MB", "–"]
    with pytest.raises(ConfigError, match="epochs and train_limit mean nothing here"):
        reproduce("complexity", Bench(tmp_path, epochs=3))


def test_feedback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "data": {"name": "DIGITS", "train_limit": 100, "test_limit": 200},
        "network": {"name": "cnn", "channels": 2, "hidden": 4},
        "optimizer": {"name": "ocnopt"},
        "training": {"epochs": 1},
    }
    monkeypatch.setattr(feedback, "_config", lambda bench: parse_run(small))
    finding = reproduce("feedback", Bench(tmp_path))
    document = check_folder(tmp_path, "feedback", finding)
    layers = document["data"]
    assert isinstance(layers, list)
    assert [layer["layer"] for layer in layers] == ["2", "5", "7", "11", "13"]
    assert set(layers[0]["labels"]) == {1, 3, 4, 7, 8, 9}
    assert all(layer["singular_values"] == sorted(layer["singular_values"], reverse=True) for layer in layers)


def test_runs_with_other_settings_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(robust.CASES[0], quick_data={"train_limit": 64, "test_limit": 50}, quick_epochs=1)
    config = robust._config(case, "SGD", 0, bench := Bench(tmp_path))
    bench.train([config])
    other = replace(config, training=replace(config.training, epochs=2))
    with pytest.raises(RunError, match="holds a run with other settings: name another folder with --out"):
        bench.train([other])


def test_markdown_table() -> None:
    assert markdown_table(("a", "b"), [["1", "2"]]) == ["| a | b |", "| --- | ---: |", "| 1 | 2 |"]


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "QUICK_ROWS", (("fcn", "WINE", 64, (), 1),))
    monkeypatch.setattr(ablation, "BASELINES", {"SGD": ablation.BASELINES["SGD"]})
    arguments = ["reproduce", "ablation", "--out", str(tmp_path), "--device", "cpu", "--workers", "1", "--seed", "5"]
    result = CliRunner().invoke(make_app(), [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert (document["scale"], document["folder"]) == ("quick", str(tmp_path))
    assert {run.config()["training"]["seed"] for run in find_runs([tmp_path])} == {5, 6, 7}
    result = CliRunner().invoke(make_app(), [*arguments, "--only", "GPT"], catch_exceptions=False)
    assert result.exit_code == 2
    assert "only must name" in result.stderr


def test_unknown_experiment(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name must be one of table1, robust, ablation, complexity, feedback"):
        reproduce("table9", Bench(tmp_path))
    assert len(EXPERIMENTS) == 7

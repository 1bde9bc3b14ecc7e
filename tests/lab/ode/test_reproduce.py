"""The experiments on Neural ODEs, cut down to seconds: what they run, what they write, and that nothing runs twice."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ocnopt.lab.cli import make_app
from ocnopt.lab.comparison import run_name
from ocnopt.lab.config import RunConfig
from ocnopt.lab.recipes import list_recipes, read_recipe
from ocnopt.lab.reproduce import Bench, Finding, continuous, convergence, horizon, reproduce, sensitivity
from ocnopt.lab.reproduce.continuous import COLUMNS, METHODS, Column, Quick
from ocnopt.lab.reproduce.table2 import trained_flow
from ocnopt.lab.runs import RunFolder, find_runs
from ocnopt.lab.schema import ConfigError

PNG = b"\x89PNG\r\n\x1a\n"

# Tables II and V as printed: Adam, SGD and OCNOpt with Runge-Kutta, then with Adams-Moulton.
PAPER = """
MNIST                      98.83 98.68 98.99  98.86 98.71 98.95
SVHN                       91.92 93.34 95.77  91.76 94.19 95.76
CIFAR10                    77.41 76.42 79.11  77.22 76.48 79.00
SpokenArabicDigits         94.64 97.70 97.41  95.33 97.80 97.45
ArticularyWordRecognition  84.14 85.82 90.23  86.28 87.05 89.50
CharacterTrajectories      93.29 95.93 96.63  88.83 95.38 97.17
Circle                      0.90  0.94  0.86   0.90  0.93  0.86
Gas                        -6.42 -4.58 -7.55  -6.51 -4.69 -7.41
Miniboone                  13.10 13.75 12.50  13.29 13.77 12.37
"""
BATCHES = {"ArticularyWordRecognition": 256, "CharacterTrajectories": 512, "Gas": 1000}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two columns that need no files, two rates an optimizer, one epoch."""
    digits = Column("mnist", "conv_ode", "DIGITS", {"dopri5": (98.83, 98.68, 98.99)})
    circle = next(column for column in COLUMNS if column.key == "circle")
    limits = {"batch_size": 32, "train_limit": 64, "test_limit": 32}
    quick = {
        "mnist": Quick(1, {**limits, "validation": 0.25}, {"channels": 2, "tolerance": 1e-2}),
        "circle": Quick(1, limits, {"width": 4, "depth": 1, "rtol": 1e-2, "atol": 1e-2, "steps": 3}),
    }
    grids: dict[str, Any] = {key: {"lr": [1e-3, 1e-2]} for key in METHODS}
    grids["ocnopt"] |= {"curvature": "kronecker", "refresh_every": 3}
    monkeypatch.setattr(continuous, "COLUMNS", (digits, circle))
    monkeypatch.setattr(continuous, "QUICK", quick)
    monkeypatch.setattr(continuous, "QUICK_GRIDS", grids)
    for module in (sensitivity, convergence):
        monkeypatch.setattr(module, "QUICK_COLUMNS", ("circle",))
    monkeypatch.setattr(horizon, "PARTS", (horizon.Part("conv_ode", "DIGITS", "mnist"),))


def check_folder(folder: Path, name: str, finding: Finding) -> Any:
    document = json.loads((folder / f"{name}.json").read_text())
    page = (folder / f"{name}.md").read_text()
    assert page.startswith(f"# {finding.title}\n\n- Scale: quick. Solver dopri5.")
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1
    for figure in finding.figures:
        assert (folder / figure).read_bytes().startswith(PNG)
    return document["data"]


@pytest.mark.usefixtures("small")
def test_table2(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    finding = reproduce("table2", bench)
    cells = check_folder(tmp_path, "table2", finding)
    assert finding.headings == ("", "DIGITS", "Circle")
    assert [row[0] for row in finding.rows] == [
        f"{m}, {w}" for m in ("Adam", "SGD", "OCNOpt") for w in ("ours", "paper")
    ]
    assert finding.rows[-1][1:] == ["**98.99**", "**0.86**"]
    assert sum(row[2].startswith("**") for row in finding.rows if "ours" in row[0]) == 1
    # per column: two rates of three optimizers, and two more seeds of the best of each
    runs = find_runs([tmp_path / "dopri5"])
    assert len(runs) == 2 * (6 + 3 * 2)
    for cell in cells:
        best_point = max(cell["grid"], key=lambda point: (point["held_out"], -point["held_out_loss"]))
        assert cell["options"]["lr"] == best_point["lr"]
        assert len(cell["tests"]) == 3
        assert cell["tests"][0] == best_point["test"]
    assert finding.remarks[1].count("an end of its grid") == 6  # a grid of two has nothing between its ends
    losses = [cell["tests"] for cell in cells if cell["dataset"] == "Circle"]
    best = min(sum(each) / 3 for each in losses)
    assert set(finding.figures) == {"table2-dopri5.png", "samples-circle-dopri5.png"}
    flow = trained_flow(next(run for run in runs if run.name.startswith("Circle-ffjord-Adam")))
    assert flow.sample(5).shape == (5, 2)
    bold = next(row for row in finding.rows if "ours" in row[0] and row[2].startswith("**"))
    assert bold[2].startswith(f"**{best:.3f} ±")
    before = {run.path: run.metrics_path.stat().st_mtime_ns for run in runs}
    assert reproduce("table2", bench).rows == finding.rows
    assert {run.path: run.metrics_path.stat().st_mtime_ns for run in find_runs([tmp_path])} == before


def test_of_two_settings_that_answer_as_much_the_surer_is_chosen(tmp_path: Path) -> None:
    def run(name: str, accuracy: float, loss: float | None) -> RunFolder:
        folder = RunFolder.create(tmp_path / name, {})
        record = {"kind": "epoch", "validation_accuracy": accuracy, "validation_loss": loss}
        folder.metrics_path.write_text(json.dumps(record) + "\n")
        return folder

    runs = [run("lost", 0.5, None), run("less", 0.4, 0.1), run("sure", 0.5, 0.2), run("unsure", 0.5, 0.3)]
    assert [folder.name for folder in sorted(runs, key=continuous.rank)] == ["less", "lost", "unsure", "sure"]


@pytest.mark.usefixtures("small")
def test_settings_are_chosen_on_held_out_samples_whatever_the_test_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(bench: Bench, configs: Sequence[RunConfig]) -> list[RunFolder]:
        return [finished(bench.folder / run_name(config), config.optimizer.lr == 1e-3) for config in configs]

    def finished(path: Path, low: bool) -> RunFolder:
        """The lower rate does better on held-out samples, and worse on those of the test."""
        folder = RunFolder.create(path, {})
        epoch = {"kind": "epoch", "validation_accuracy": 0.9 if low else 0.8, "validation_loss": 0.3}
        final = {"kind": "final", "test_accuracy": 0.5 if low else 0.7}
        folder.metrics_path.write_text(f"{json.dumps(epoch)}\n{json.dumps(final)}\n")
        return folder

    monkeypatch.setattr(Bench, "train", trained)
    found = continuous.search(Bench(tmp_path), continuous.COLUMNS[:1], (0, 1))
    assert [each.best.lr for each in found.values()] == [1e-3] * 3
    assert [each.tests() for each in found.values()] == [[50.0, 50.0]] * 3


@pytest.mark.usefixtures("small")
def test_another_solver_has_runs_of_its_own(tmp_path: Path) -> None:
    arguments = ["reproduce", "table2", "--only", "Circle", "--solver", "implicit_adams", "--epochs", "1"]
    result = CliRunner().invoke(make_app(), [*arguments, "--out", str(tmp_path), "--workers", "1"])
    assert result.exit_code == 0, result.output
    runs = find_runs([tmp_path / "implicit_adams"])
    assert {run.config()["network"]["solver"] for run in runs} == {"implicit_adams"}
    assert "0.93" in result.output  # SGD, Table V
    assert (tmp_path / "table2-implicit_adams.png").exists()


def test_solvers_are_for_neural_odes(tmp_path: Path) -> None:
    result = CliRunner().invoke(make_app(), ["reproduce", "robust", "--solver", "dopri5", "--out", str(tmp_path)])
    assert result.exit_code != 0
    assert "--solver is for experiments on Neural ODEs" in result.output


@pytest.mark.usefixtures("small")
def test_sensitivity(tmp_path: Path) -> None:
    finding = reproduce("sensitivity", Bench(tmp_path))
    lines = check_folder(tmp_path, "sensitivity", finding)
    assert [len(line["points"]) for line in lines] == [2] * 3
    for row, line in zip(finding.rows, lines, strict=True):
        tests = sorted((point["test"] for point in line["points"]), reverse=line["dataset"] != "Circle")
        assert row[2:5] == [f"{tests[0]:.2f}", f"{tests[1]:.2f}", f"{tests[-1]:.2f}"]
    assert any(row[5] != "0 of 2" for row in finding.rows)


def test_a_run_that_failed_is_not_usable() -> None:
    column = next(column for column in COLUMNS if column.key == "circle")
    values = {"adam": [1.0, math.inf], "sgdm": [1.2, 1.4], "ocnopt": [0.9, 1.0]}
    points = {("circle", key): [{"lr": 0.1, "test": v} for v in each] for key, each in values.items()}
    assert [sensitivity._usable(column, key, points) for key in METHODS] == [(1, 2), (1, 2), (2, 2)]


@pytest.mark.usefixtures("small")
def test_convergence(tmp_path: Path) -> None:
    finding = reproduce("convergence", Bench(tmp_path, epochs=2))
    lines = check_folder(tmp_path, "convergence", finding)
    for line in lines:
        (curve,) = line["curves"]
        assert len(curve["epoch_seconds"]) == len(curve["test"]) == 2
        assert curve["seconds"] == sorted(curve["seconds"])
    assert finding.rows[0][3] == "1.00"


def test_the_time_to_a_result() -> None:
    curves = [{"epoch_seconds": [1.0, 2.0, 3.0], "test": [0.5, 0.8, 0.7]}, {"epoch_seconds": [2.0], "test": [0.9]}]
    assert convergence._reached(curves, 0.75) == 2.0
    assert convergence._reached(curves, 0.85) is None


@pytest.mark.usefixtures("small")
def test_horizon(tmp_path: Path) -> None:
    finding = reproduce("horizon", Bench(tmp_path))
    arms = check_folder(tmp_path, "horizon", finding)
    assert [arm["T"] for arm in arms] == [1.0, 0.75, 0.5, 0.2, 1.0, *[1.0, 0.2] * 3]
    assert [arm["optimizer"] for arm in arms] == [*["ocnopt"] * 4, "adam", *["ocnopt"] * 4, *["adam"] * 2]
    assert arms[0]["relative_time"] == arms[4]["relative_time"] == [100.0, 100.0]  # each against its own
    for arm in arms[5:]:
        assert all(len(path) == 2 for path in arm["path"])  # a step each
        assert all(path[-1] != arm["T"] for path in arm["path"])
    assert [row[4:] for row in finding.rows if row[4] != "–"] == [["81", "77.82"], ["96", "76.61"]]
    sizes = {run.config()["network"]["time"] for run in find_runs([tmp_path])}
    assert sizes == {1.0, 0.75, 0.5, 0.2}


def test_names_of_parts_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only must name parts of this experiment"):
        reproduce("table2", Bench(tmp_path, only=("WINE",)))
    with pytest.raises(ConfigError, match="only must name parts"):
        reproduce("table2", Bench(tmp_path, only=("Gas",)))  # not at the quick scale


def test_the_columns_are_those_of_the_paper() -> None:
    printed = {line.split()[0]: tuple(map(float, line.split()[1:])) for line in PAPER.strip().splitlines()}
    assert {c.dataset: c.paper["dopri5"] + c.paper["implicit_adams"] for c in COLUMNS} == printed


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.key)
def test_recipes_say_what_the_paper_says(column: Column, tmp_path: Path) -> None:
    recipe = read_recipe(f"table2-{column.key}")
    assert (recipe.run.data.name, recipe.run.network.name) == (column.dataset, column.network)
    assert recipe.run.data.batch_size == BATCHES.get(column.dataset, 128)
    assert recipe.paper == column.in_paper("dopri5")
    options = recipe.run.network.options
    tolerances = {"rtol": 1e-6, "atol": 1e-8} if column.by_loss else {"tolerance": 1e-3}
    assert {key: options[key] for key in tolerances} == tolerances
    ocnopt = recipe.grids["ocnopt"].choices
    assert ocnopt["curvature"] == ("kronecker",)
    assert 100 <= ocnopt["refresh_every"][0] <= 250
    assert ocnopt["feedback"] == ("linear",)  # off is the default where there is a Neural ODE
    full = continuous.recipe_of(column, Bench(tmp_path, "full", solver="implicit_adams"))
    assert full.run.network.options["solver"] == "implicit_adams"
    assert full.grids == recipe.grids


def test_there_is_a_recipe_for_every_column() -> None:
    names = {path.stem for path in list_recipes() if path.stem.startswith("table2-")}
    assert names == {f"table2-{column.key}" for column in COLUMNS}


@pytest.mark.parametrize("key", continuous.QUICK)
def test_quick_recipes_can_be_read(key: str, tmp_path: Path) -> None:
    column = next(column for column in COLUMNS if column.key == key)
    recipe = continuous.recipe_of(column, Bench(tmp_path, epochs=7))
    assert recipe.run.training.epochs == 7
    assert set(recipe.grids) == set(METHODS)
    assert len({len(grid) for grid in recipe.grids.values()}) == 1  # as many settings for each

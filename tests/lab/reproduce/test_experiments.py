"""Every experiment, cut down to seconds: what it runs, what it writes, and that it does not repeat itself."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from rich.console import Console
from typer.testing import CliRunner

from ocnopt.lab.cli import make_app, shared
from ocnopt.lab.config import parse_run
from ocnopt.lab.recipes import parse_recipe
from ocnopt.lab.reproduce import (
    EXPERIMENTS,
    Bench,
    Finding,
    ablation,
    complexity,
    feedback,
    figures,
    reproduce,
    robust,
    table1,
)
from ocnopt.lab.reproduce.bench import markdown_table
from ocnopt.lab.reproduce.gain import Gain
from ocnopt.lab.reproduce.paper import TABLE1
from ocnopt.lab.runs import RunError, RunFolder, find_runs
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.sweep import Line
from ocnopt.lab.sweep.results import Setting

PNG = b"\x89PNG\r\n\x1a\n"


def check_folder(folder: Path, name: str, finding: Finding) -> dict[str, object]:
    document: dict[str, object] = json.loads((folder / f"{name}.json").read_text())
    page = (folder / f"{name}.md").read_text()
    assert document["verdict"] == finding.verdict
    assert ("**Verdict.**" in page) == (finding.verdict != "")
    assert document["scale"] == "quick"
    assert page.startswith(f"# {finding.title}\n\n- Scale: quick.")
    assert len({line.count("|") for line in page.splitlines() if line.startswith("|")}) == 1
    for figure in finding.figures:
        assert (folder / figure).read_bytes().startswith(PNG)
        assert f"]({figure})" in page
    return document


def test_table1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table1.QUICK, "fcn-wine", table1.Quick(7, 32, left_out=("emsa", "ddp", "ekfac", "rmsprop")))
    few = {"sgdm": {"lr": 0.1}, "adam": {"lr": 0.01, "weight_decay": [0.0, 1e-3]}}
    monkeypatch.setattr(table1, "FCN_GRIDS", {**few, "ocnopt": {"curvature": ["adaptive", "kronecker"]}})
    lines: list[str] = []
    counts: list[tuple[str, float, int]] = []
    options = {"tell": lines.append, "count": lambda *count: counts.append(count)}
    bench = Bench(tmp_path, only=("fcn-wine",), epochs=1, train_limit=100, **options)
    finding = reproduce("table1", bench)
    check_folder(tmp_path, "table1", finding)
    assert finding.verdict.startswith("OCNOpt is ")
    (ours, paper) = finding.rows
    assert ours[:2] == ["WINE, fcn", "ours"]
    assert [cell == "–" for cell in ours[2:]] == [False, True, False, True, True, True, False]
    assert paper[2:] == ["94.35", "98.10", "98.13", "94.60", "93.56", "98.00", "**98.18**"]
    runs = find_runs([tmp_path / "fcn-wine" / "runs"])
    assert len(runs) == 3 * (1 + 2 + 2)  # the settings are chosen with all seeds: there are few samples
    tables = [run.config() for run in runs]
    assert {(t["data"]["validation"], t["data"]["train_limit"], t["training"]["epochs"]) for t in tables} == {
        (0.2, 100, 1)
    }
    samples = "80 training samples, 20 held out, 36 test samples, a part of the dataset"
    assert finding.setting[-1] == f"fcn-wine: {samples}, 1 epochs, batch 32."
    assert lines[-1] == "fcn-wine: 9 of 9 runs"
    assert counts[-1] == ("fcn-wine", 9, 9)
    before = {run.path: run.metrics_path.stat().st_mtime_ns for run in runs}
    assert reproduce("table1", bench).rows == finding.rows
    assert {run.path: run.metrics_path.stat().st_mtime_ns for run in find_runs([tmp_path])} == before


def test_larger_rows_of_table1_choose_with_one_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table1, "SMALL", ())
    monkeypatch.setitem(table1.QUICK, "fcn-wine", table1.Quick(1, 64, left_out=("emsa", "ddp", "ekfac", "rmsprop")))
    one = {"sgdm": {"lr": 0.01}, "adam": {"lr": 0.01}, "ocnopt": {"lr": [0.001, 0.01, 0.1]}}
    monkeypatch.setattr(table1, "FCN_GRIDS", one)
    reproduce("table1", Bench(tmp_path, only=("WINE",)))
    assert len(find_runs([tmp_path])) == 5 + 2 * 3  # two more seeds for the best of each of the three optimizers


def a_line(grid: str, lr: float, test: float = 1.0, deviation: float = 0.0) -> Line:
    best = Setting("", {"lr": lr}, seeds=3, validation=1.0, test=test, test_deviation=deviation, seconds=1.0)
    return Line(grid, "", points=1, done=1, failed=0, best=best, paper=None, errors=[])


def test_numbers_far_below_the_others_do_not_flatten_a_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    bars: list[float] = []
    monkeypatch.setattr(Axes, "text", lambda ax, x, y, text, **_: texts.append(text))
    monkeypatch.setattr(Axes, "errorbar", lambda ax, x, y, *_, **__: bars.append(y))
    found = {"fcn-wine": [a_line("adam", 0.1, 90.0), a_line("ddp", 0.1, 37.8, 47.0)]}
    figures.draw_table(tmp_path / "table1.png", TABLE1[:1], found)
    assert (bars, texts) == ([90.0], ["↓ 38"])


def test_verdict_of_table1() -> None:
    wine, digits, mnist = TABLE1[:3]
    found = {
        "fcn-wine": [a_line("adam", 0.1, 98.0), a_line("ocnopt", 0.1, 98.0)],
        "fcn-digits": [a_line("adam", 0.1, 95.0, 0.3), a_line("ekfac", 0.1, 96.0, 0.2), a_line("ocnopt", 0.1, 95.5)],
        "fcn-mnist": [a_line("sgdm", 0.1, 92.0, 0.2), a_line("ocnopt", 0.1, 92.5, 0.6)],
    }
    assert table1._verdict([wine, digits, mnist], found) == (
        "OCNOpt is first in 1: fcn-mnist (+0.50 against SGDm, within the deviation); tied for first in 1: fcn-wine; "
        "not first in 1: fcn-digits (-0.50 against EKFAC). In the paper it is first in 2 of these 3."
    )


@pytest.mark.parametrize("name", table1.QUICK_ROWS)
def test_the_ordinary_optimizers_have_as_many_settings(name: str, tmp_path: Path) -> None:
    row = next(row for row in TABLE1 if row.name == name)
    grids = parse_recipe(table1.recipe_of(row, Bench(tmp_path))).grids
    ordinary = ("sgdm", "rmsprop", "adam", "ekfac", "ocnopt")
    assert {len(grids[key]) for key in ordinary} == {12 if row.network == "fcn" else 5}
    assert row.curvature in grids["ocnopt"].choices["curvature"]
    assert table1.recipe_of(row, Bench(tmp_path, "full"))["grids"]["sgdm"]["lr"][0] == 3e-3  # the paper's


def test_rates_at_an_end_of_their_grid_are_named(tmp_path: Path) -> None:
    found = {"fcn-wine": [a_line("sgdm", 0.3), a_line("adam", 1e-3), a_line("ekfac", 3e-4), a_line("ddp", 0.1)]}
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
    assert finding.verdict.startswith("DIGITS: unlike in the paper, OCNOpt does not learn at this rate (")  # 2 steps


@pytest.mark.parametrize(
    ("sgd", "ours", "verdict"),
    [
        ([10, 12, 11], [70, 80, 75], "as in the paper, OCNOpt learns and SGD does not"),
        ([10, 12, 11], [12, 10, 11], "unlike in the paper, OCNOpt does not learn at this rate"),
        (
            [90, 92, 91],
            [91, 93, 92],
            "unlike in the paper, SGD learns too, and the two are within the deviation",
        ),
        ([90, 92, 91], [96, 95, 97], "unlike in the paper, SGD learns too; OCNOpt is better"),
        ([90, 92, 91], [86, 85, 87], "unlike in the paper, SGD learns too; OCNOpt is worse"),
    ],
)
def test_verdict_of_robust(
    sgd: list[float], ours: list[float], verdict: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(robust, "test_accuracy", lambda run: float(run.name))
    case = robust.CASES[0]
    runs = {(case, name): [RunFolder(str(v)) for v in values] for name, values in (("SGD", sgd), ("OCNOpt", ours))}
    assert robust._verdict(case, runs, guess=10.0).startswith(f"DIGITS: {verdict}")


def test_a_run_that_diverges_does_not_take_the_curve_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[np.ndarray] = []
    bands: list[np.ndarray] = []
    plot = Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda ax, x, y, *a, **o: [lines.append(np.atleast_1d(y)), plot(ax, x, y, *a, **o)]
    )
    monkeypatch.setattr(Axes, "fill_between", lambda ax, x, low, high, **_: bands.append(high))
    runs = [[2.0] * 10, [4.0] * 10, [3.0] * 4 + [float("nan")], [3.0] * 10]
    figures.draw_curves(tmp_path / "curves.png", {"MNIST": "MNIST"}, {("MNIST", "SGD"): runs})
    cross, median = lines
    assert cross == pytest.approx([4.8])  # the upper edge, at step 4
    assert median == pytest.approx([3.0] * 4 + [3.5] * 6)  # of 2, 3, 4 and a loss beyond all bounds
    assert np.isfinite(bands[0]).all()
    assert (bands[0][4:] > 4.8).all()


def test_robust_has_the_learning_rates_of_the_paper() -> None:
    rates = {case.dataset: (case.network, case.lr) for case in robust.CASES}
    assert rates == {"DIGITS": ("fcn", 0.6), "MNIST": ("inception", 1.0), "SVHN": ("inception", 2.0)}


def test_ablation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "QUICK_ROWS", (ablation.Row("fcn", "WINE", 32, 1),))
    finding = reproduce("ablation", Bench(tmp_path))
    document = check_folder(tmp_path, "ablation", finding)
    assert finding.verdict.startswith("Cells that tell something: ")
    cells = document["data"]
    assert isinstance(cells, list)
    assert [cell["baseline"] for cell in cells] == list(ablation.BASELINES)
    for cell in cells:
        differences = [on - off for off, on in zip(cell["off"], cell["on"], strict=True)]
        assert cell["difference"] == pytest.approx(sum(differences) / 3)
    # three rates with two seeds to choose from, then the third seed, and all seeds with the feedback on
    assert len(find_runs([tmp_path])) == 4 * (3 * 2 + 1 + 3)
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


def test_the_rate_of_an_ablation_is_the_one_that_both_seeds_prefer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "BASELINES", {"SGD": replace(ablation.BASELINES["SGD"], quick_rates=(0.1, 0.3))})
    scores = {(0.1, 0): 0.9, (0.1, 1): 0.1, (0.3, 0): 0.8, (0.3, 1): 0.7}
    monkeypatch.setattr(ablation, "_train", lambda cells, bench: [scores[cell.lr, cell.seed] for cell in cells])
    monkeypatch.setattr(ablation, "held_out_accuracy", lambda score: score)
    (best,) = ablation._best(ablation.QUICK_ROWS[:1], (0, 1), Bench(tmp_path))
    assert best.lr == 0.3


@pytest.mark.parametrize(
    ("off", "on", "doubt"),
    [
        ([80, 80, 80], [84, 85, 86], None),
        ([12, 10, 11], [13, 11, 12], "neither side has learned"),
        ([12, 10, 11], [70, 71, 72], None),
        ([80, 90, 40], [85, 70, 90], "the change is no larger than its deviation"),
        ([80, 80, 80], [80, 80, 80], "the change is no larger than its deviation"),
    ],
)
def test_cells_that_tell_nothing(off: list[float], on: list[float], doubt: str | None) -> None:
    cell = {"lr": 0.1, **ablation._measure(off, on, guess=10.0)}
    assert cell["doubt"] == doubt
    assert ablation._cell(cell).startswith("[") == (doubt is not None)


def test_verdict_of_the_ablation() -> None:
    cells = {
        ("DIGITS, fcn", "SGD"): {"difference": 2.0, "doubt": None},
        ("DIGITS, fcn", "Adam"): {"difference": 22.0, "doubt": "the change is no larger than its deviation"},
    }
    start = "Cells that tell something: 1 of 2. The feedback helps in 1: DIGITS, fcn, SGD (+2.00); it costs "
    assert ablation._verdict(cells) == f"{start}accuracy in 0, as in the paper."
    cells["DIGITS, fcn", "Adam"] = {"difference": -1.5, "doubt": None}
    assert ablation._verdict(cells).endswith("in 1: DIGITS, fcn, Adam (-1.50), which does not agree with the paper.")


def test_doubtful_cells_have_no_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[list[list[float]]] = []
    texts: list[str] = []
    monkeypatch.setattr(Axes, "imshow", lambda ax, table, **_: tables.append(table))
    monkeypatch.setattr(Axes, "text", lambda ax, x, y, text, **_: texts.append(text))
    figures.draw_heat_map(tmp_path / "map.png", ["a"], ["b", "c"], {("a", "b"): 1.0, ("a", "c"): 43.0}, {("a", "c")})
    assert tables == [[[1.0, 0.0]]]
    assert texts == ["+1.00", "[+43.00]"]


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
        held = torch.ones(400_000_000, dtype=torch.uint8)  # far more than tests before this one may have left behind

    monkeypatch.setattr(complexity, "take_step", take_step)
    monkeypatch.setattr(complexity, "MOST_STEPS", 1)
    wasteful = complexity.measure(panel, "SGDm", 8, 1, "cpu")
    torch.set_num_threads(threads)
    if wasteful.megabytes is not None:  # only Linux tells
        assert 300 < wasteful.megabytes < 1000


def test_complexity_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(panel: complexity.Panel, method: str, size: int, steps: int, device: str) -> complexity.Cell:
        failed = (method, size) == ("E-MSA", 128)
        error = "out of memory" if failed else None
        return complexity.Cell(panel.network, method, size, None if failed else 1e-3 * size, None, error)

    monkeypatch.setattr(complexity, "_measure_apart", measure)
    finding = reproduce("complexity", Bench(tmp_path))
    check_folder(tmp_path, "complexity", finding)
    assert finding.rows[0][:3] == ["MNIST, cnn", "SGDm", "8.0 ms, –"]
    assert finding.rows[3][-1] == "out of memory"
    assert "batch 128: a step of OCNOpt takes 1.0 times as long as one of Adam" in finding.verdict
    assert finding.verdict.endswith("1.00 times as long as one of EKFAC, within the paper's ± 40 %.")
    slow = [replace(complexity.Cell(**cell), seconds=2.0) for cell in finding.data if "Kronecker" in cell["method"]]
    cells = [complexity.Cell(**cell) for cell in finding.data if "Kronecker" not in cell["method"]]
    assert "15.62 times as long as one of EKFAC, outside" in complexity._verdict(complexity.QUICK[0], cells + slow)


def test_complexity_panels_of_different_sizes_share_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(panel: complexity.Panel, method: str, size: int, steps: int, device: str) -> complexity.Cell:
        return complexity.Cell(panel.network, method, size, 1e-3 * size, 1.0)

    monkeypatch.setattr(complexity, "_measure_apart", measure)
    finding = reproduce("complexity", Bench(tmp_path, "full"))
    assert {len(row) for row in finding.rows} == {len(finding.headings)} == {2 + 7}
    assert [row[-1] for row in finding.rows if row[1] == "SGDm"] == ["1024.0 ms, 1 MB", "–"]
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
    assert "of the vector (of its square) lies on the strokes" in finding.verdict
    layers = document["data"]
    assert isinstance(layers, list)
    assert [layer["layer"] for layer in layers] == ["2", "5", "7", "11", "13"]
    assert set(layers[0]["labels"]) == {1, 3, 4, 7, 8, 9}
    assert all(layer["singular_values"] == sorted(layer["singular_values"], reverse=True) for layer in layers)


def test_feedback_lies_on_strokes_or_not() -> None:
    x = torch.zeros(1, 1, 4, 4)
    x[..., 0] = 1.0  # a stroke, a quarter of the pixels
    on, off = torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 4)
    on[..., 0] = 1.0
    off[..., 0] = 0.0
    none = torch.zeros(1)
    assert feedback._verdict(x, Gain("2", none, none, x, on)).startswith(
        "100 % of the vector (of its square) lies on the strokes, which are 25 % of the pixels: this fits"
    )
    assert "0 % of the vector" in (verdict := feedback._verdict(x, Gain("2", none, none, x, off)))
    assert "unlike what the paper sees" in verdict


@pytest.mark.parametrize("name", ["table1", "robust", "ablation", "complexity", "feedback"])
def test_a_name_that_fits_no_part_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"only must name parts of this experiment at this scale \(.*\), got 'xxx'"):
        reproduce(name, Bench(tmp_path, only=("MNIST" if name != "ablation" else "DIGITS", "xxx")))
    assert not any(tmp_path.iterdir())


def test_progress_counts_epochs(tmp_path: Path) -> None:
    counts: list[tuple[str, float, int]] = []
    case = replace(robust.CASES[0], quick_data={"train_limit": 64, "test_limit": 50}, quick_epochs=2)
    bench = Bench(tmp_path, count=lambda *count: counts.append(count))
    bench.train([robust._config(case, "SGD", seed, bench) for seed in (0, 1)])
    assert [done for _, done, _ in counts] == [0.5, 1.0, 1.0, 1.5, 2.0, 2.0]  # the last of each run: its end
    assert {(what, total) for what, _, total in counts} == {("runs", 2)}


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
    monkeypatch.setattr(ablation, "QUICK_ROWS", (ablation.Row("fcn", "WINE", 64, 1),))
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


def test_command_shows_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from ocnopt.lab.cli.reproduce import _progress

    monkeypatch.setattr(shared, "progress_console", console := Console(force_terminal=True, width=80, stderr=True))
    with _progress(quiet=False) as (tell, count):
        tell("a run: 90 %")
        count("runs", 1.5, 4)
    assert console.is_terminal
    shown = capsys.readouterr().err
    assert "a run: 90 %" in shown
    assert "runs: 1 of 4" in shown
    assert "38%" in shown


def test_unknown_experiment(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name must be one of table1, robust, ablation, complexity, feedback"):
        reproduce("table9", Bench(tmp_path))
    assert len(EXPERIMENTS) == 11

"""The benchmark scripts run end to end on tiny data of their own, and keep and report what they measured."""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import inspect
import io
import json
import math
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import ocnopt

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # as Python itself does for a script

import _images  # noqa: E402
import _report  # noqa: E402
import _runs  # noqa: E402
from _training import build_optimizer, lr_factor  # noqa: E402


def script(name: str) -> ModuleType:
    """Import a script under a name that no other module has (the examples have a digits.py as well)."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpt, vision, digits, games = map(script, ("gpt", "vision", "digits", "games"))


# --- runs: variants, plan, journal --------------------------------------------------------------------------


def test_a_variant_is_a_list_of_literals_and_bare_words() -> None:
    variant = _runs.parse_variant("mine:rank=full,betas=(0.9, 0.95),clamp=False,feedback='off',lr=1e-2")
    assert variant.name == "mine"
    assert variant.values == {
        "rank": "full",
        "betas": (0.9, 0.95),
        "clamp": False,
        "feedback": "off",
        "lr": 0.01,
    }


@pytest.mark.parametrize("text", ["mine", "mine:", ":rank=1", "mine:rank", "mine:rank=open('x')", "mine:**x"])
def test_a_malformed_variant_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="variant"):
        _runs.parse_variant(text)


def plan(*argv: str) -> list[_runs.Run]:
    arguments = gpt.parse_arguments(["--sizes", "tiny", "--seeds", "0", *argv])
    return _runs.plan(arguments, arguments.sizes, gpt.families(arguments), {"steps": 700})


def test_a_variant_changes_options_settings_and_learning_rates() -> None:
    runs = plan("--optimizers", "adamw", "--variant", "other:optimizer=adamw,warmup=7,eps=1e-6,lr=(0.1,0.2)")
    assert [(run.variant, run.lr) for run in runs] == [
        *(("adamw", lr) for lr in gpt.ADAMW_LRS),
        ("other", 0.1),
        ("other", 0.2),
    ]
    assert runs[0].settings == {"steps": 700, "warmup": 100}
    assert runs[-1].settings == {"steps": 700, "warmup": 7}
    assert runs[-1].options == {"betas": (0.9, 0.99), "weight_decay": 0.01, "eps": 1e-6}


def test_a_record_spells_out_the_defaults_so_that_a_changed_one_is_run_again() -> None:
    (run,) = plan("--optimizers", "", "--variant", "mine:rank=8,lr=0.1")
    defaults = inspect.signature(ocnopt.OCNOpt).parameters
    assert run.options["decay"] == defaults["decay"].default
    assert run.options["rank"] == 8
    assert set(run.options) == set(defaults) - {"params", "lr", "model"}


def test_without_feedback_the_range_rows_are_their_baselines() -> None:
    def loss(row: Any, options: dict[str, Any]) -> float:
        run = _runs.Run(row.part, row.optimizer, row.name, 3e-3, 0, options, {"epochs": 2, "batch": 256})
        return float(digits.train(run)["train_loss"])

    for momentum in (0.0, 0.9):
        rows = digits.range_rows(momentum)
        for baseline in (row for row in rows if row.optimizer != "ocnopt"):
            ours = next(row for row in rows if row.part == baseline.part and row.optimizer == "ocnopt")
            options = {**digits.options_of(ours), "feedback": "off"}
            assert loss(ours, options) == pytest.approx(loss(baseline, baseline.options), rel=1e-4)


def test_a_grid_replaces_the_learning_rates() -> None:
    assert [run.lr for run in plan("--optimizers", "adamw", "--lr", "adamw=0.5,0.25")] == [0.5, 0.25]
    with pytest.raises(SystemExit, match="--lr names nobody"):
        plan("--optimizers", "adamw", "--lr", "nobody=0.5")


def test_two_rows_of_one_name_are_refused() -> None:
    with pytest.raises(SystemExit, match="name of its own"):
        plan("--optimizers", "adamw", "--variant", "adamw:optimizer=adamw,eps=1")


def some_runs(count: int) -> list[_runs.Run]:
    return [_runs.Run("task", "sgd", "sgd", 0.1, seed) for seed in range(count)]


def test_finished_runs_are_skipped_and_failed_ones_done_again(tmp_path: Path) -> None:
    path, seen = tmp_path / "runs.jsonl", []

    def train(run: _runs.Run) -> dict[str, Any]:
        seen.append(run.seed)
        if len(seen) == 2:
            raise RuntimeError("the second call fails")
        return {"loss": math.nan}

    assert _runs.execute(some_runs(3), train, path) == 1
    assert _runs.execute(some_runs(3), train, path) == 0
    assert seen == [0, 1, 2, 1]
    records = _runs.load(path)
    assert [record["result"] for record in records] == [{"loss": None}] * 3
    assert len(path.read_text().splitlines()) == 4


def test_the_half_line_of_a_killed_process_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    _runs.execute(some_runs(2), lambda run: {"loss": 1.0}, path)
    path.write_text(path.read_text()[:-20])
    assert _runs.execute(some_runs(2), lambda run: {"loss": 2.0}, path) == 0
    assert sorted(record["result"]["loss"] for record in _runs.load(path)) == [1.0, 2.0]


def test_a_spent_budget_leaves_the_rest(tmp_path: Path) -> None:
    assert _runs.execute(some_runs(3), lambda run: {}, tmp_path / "runs.jsonl", budget=0.0) == 3


# --- report -------------------------------------------------------------------------------------------------


def record(optimizer: str, lr: float, seed: int, loss: float | None, **changes: Any) -> _runs.Record:
    run = _runs.Run("5m", optimizer, changes.pop("variant", optimizer), lr, seed, settings=changes)
    return _runs.attempt(lambda _: {"loss": loss, "ms_per_step": 2.0}, run)


def test_the_report_measures_the_distance_to_the_best_baseline() -> None:
    records = [
        *(record("adamw", 0.001, seed, 2.0 + 0.1 * seed) for seed in (0, 1)),
        *(record("adamw", 0.01, seed, 1.0 + 0.1 * seed) for seed in (0, 1)),
        *(record("ocnopt", 0.01, seed, 1.05 - 0.1 * seed) for seed in (0, 1)),
        *(record("ocnopt", 0.03, seed, [None, 1.1][seed]) for seed in (0, 1)),
    ]
    metric = _report.Metric("loss", "loss", digits=2)
    by_lr, differences = (
        table.splitlines()
        for table in (
            _report.table_by_lr(records, metric),
            _report.table_of_differences(records, metric),
        )
    )
    assert by_lr[2:] == [
        "| 5m | adamw | 2.05 ± 0.07 | **1.05 ± 0.07** |  | 2.00 |",
        "| 5m | ocnopt |  | 1.00 ± 0.07 (−4.8 %) | diverged in 1 of 2 | 2.00 |",
    ]
    assert differences[2:] == [
        "| 5m | ocnopt | 0.01 | adamw, lr 0.01 | −4.3 % | +5.0 % | 1 of 2 | 0 |",
        "| 5m | ocnopt | 0.03 | adamw, lr 0.01 | +0.0 % | +0.0 % | 0 of 1 | 1 |",
    ]


def test_two_different_runs_of_one_name_are_not_mixed() -> None:
    records = [record("adamw", 0.1, 0, 1.0, steps=10), record("adamw", 0.1, 0, 2.0, steps=20)]
    with pytest.raises(SystemExit, match="two different runs"):
        _report.cells(records, _report.Metric("loss", "loss"))


def test_the_schedule_warms_up_and_decays() -> None:
    assert [lr_factor(step, 10, 4, False) for step in (0, 3, 4, 9)] == [0.25, 1.0, 1.0, 1.0]
    assert lr_factor(4, 10, 4, True) == 1.0
    assert lr_factor(10, 10, 4, True) == pytest.approx(0.1)


# --- gpt ----------------------------------------------------------------------------------------------------

TINY = ["--steps", "4", "--batch", "4", "--context", "16", "--device", "cpu"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8).tobytes())
    return path


def test_gpt_runs_in_workers_resumes_and_reports(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpt.jsonl"
    words = ["--sizes", "tiny", "--seeds", "0", "--lr", "adamw=0.01", "--lr", "ocnopt=0.01", "--jobs", "2"]
    words += [*TINY, "--text", str(text), "--out", str(out)]
    command = [sys.executable, str(BENCHMARKS / "gpt.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(r["optimizer"] for r in records) == ["adamw", "ocnopt"]
    assert all(4 < r["result"]["val_loss"] < 7 for r in records)
    assert "| tiny | ocnopt | 0.01 | adamw, lr 0.01 |" in done.stdout

    assert gpt.main(words) == 0
    assert "2 runs, 2 already" in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 2


def test_seed_for_seed_all_optimizers_start_alike_and_see_the_same_batches(
    text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = vars(gpt.parse_arguments([*TINY, "--text", str(text), "--precision", "fp32"]))
    seen: list[list[int]] = []
    windows = gpt.windows
    monkeypatch.setattr(gpt, "windows", lambda t, starts, c: (seen.append(starts.tolist()), windows(t, starts, c))[1])

    def trained(optimizer: str, seed: int) -> tuple[list[float], list[list[int]]]:
        """The losses, which at learning rate 0 tell the initial weights, and where the batches began."""
        seen.clear()
        run = _runs.Run("tiny", optimizer, optimizer, 0.0, seed, {}, {**arguments, "warmup": 0})
        return gpt.train(run)["train_curve"], seen[: arguments["steps"]]

    sgd, adamw, other = trained("sgd", 0), trained("adamw", 0), trained("sgd", 1)
    assert sgd == adamw
    assert sgd[0] != other[0]
    assert sgd[1] != other[1]


def test_the_targets_are_the_next_bytes() -> None:
    inputs, targets = gpt.windows(torch.arange(10, dtype=torch.uint8), torch.tensor([0, 5]), 3)
    assert inputs.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert targets.tolist() == [[1, 2, 3], [6, 7, 8]]


def test_gpt_learns(text: Path) -> None:
    text.write_bytes(b"abcdefgh" * 2500)
    arguments = vars(gpt.parse_arguments([*TINY, "--steps", "60", "--text", str(text)]))
    run = _runs.Run("tiny", "adamw", "adamw", 0.03, 0, {}, {**arguments, "warmup": 0})
    assert gpt.train(run)["val_loss"] < 1.0


def test_the_order_of_the_corpus_does_not_depend_on_the_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    data = gpt.corpus(limit=2_000_000)
    assert len(data) == 2_000_000
    assert b"import " in data
    listing = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: reversed(list(listing(self, pattern))))
    assert data == gpt.corpus(limit=2_000_000)


# --- vision -------------------------------------------------------------------------------------------------


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(header + array.tobytes()))


def write_cifar(path: Path, batches: dict[str, Any]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, batch in batches.items():
            data = pickle.dumps(batch, protocol=2)
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Both data sets in their official formats, with random pixels."""
    draw = np.random.default_rng(0)
    folder = tmp_path / "fashion_mnist"
    folder.mkdir()
    for part, count in (("train", 16), ("t10k", 8)):
        pixels = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", pixels)
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8) % 10)
    batches = {
        name: {
            b"data": draw.integers(0, 256, (8, 3072), dtype=np.uint8),
            b"labels": [(start + i) % 10 for i in range(8)],
        }
        for start, name in enumerate(("data_batch_2", "data_batch_1", "test_batch"))
    }
    write_cifar(tmp_path / "cifar-10-python.tar.gz", batches)
    return tmp_path


def test_cifar_batches_are_read_in_order_and_standardised(data: Path) -> None:
    images = _images.cifar10(data)
    assert images.train_x.shape == (16, 3, 32, 32)
    assert images.test_x.shape == (8, 3, 32, 32)
    assert images.train_y.tolist() == [*range(1, 9), *range(8)]
    assert images.train_x.mean((0, 2, 3)).abs().max() < 1e-5
    assert (images.train_x.std((0, 2, 3)) - 1).abs().max() < 1e-5
    assert len(images.first(5).train_y) == 5


@pytest.mark.parametrize("intruder", [np.load, subprocess.run])
def test_a_pickle_that_wants_more_than_arrays_is_refused(tmp_path: Path, intruder: Any) -> None:
    write_cifar(tmp_path / "cifar-10-python.tar.gz", {"data_batch_1": intruder})
    with pytest.raises(pickle.UnpicklingError, match=f"{intruder.__name__}, which no CIFAR batch needs"):
        _images.cifar10(tmp_path)


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--data or OCNOPT_DATA"):
        _images.fashion_mnist(tmp_path)


def test_vision_runs_and_reports(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "vision.jsonl"
    grids = ["--optimizers", "ocnopt,sgd", "--lr", "sgd=0.1", "--lr", "ocnopt=0.01", "--seeds", "0"]
    small = ["--data", str(data), "--epochs", "1", "--batch", "8", "--device", "cpu", "--out", str(out)]
    assert vision.main([*grids, *small]) == 0
    printed = capsys.readouterr().out
    assert "| fmnist-fcn | ocnopt | 0.01 | sgd, lr 0.1 |" in printed
    assert "| cifar10-cnn | ocnopt | 0.01 | sgd, lr 0.1 |" in printed
    assert vision.main(["--report", str(out)]) == 0
    assert capsys.readouterr().out == printed


# --- digits and games ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("good", "expected"),
    [("01101", (1, 2)), ("00000", (0, -1)), ("11111", (0, 4)), ("10011", (3, 4)), ("11011", (0, 1))],
)
def test_the_widest_stretch(good: str, expected: tuple[int, int]) -> None:
    assert digits.widest([letter == "1" for letter in good]) == expected


def test_ranges_near_the_own_best_and_near_the_best_of_the_curvature() -> None:
    def run(name: str, lr: float, accuracy: float) -> _runs.Record:
        done = _runs.Run("range identity", "sgd", name, lr, 0)
        return _runs.attempt(lambda _: {"test_accuracy": accuracy}, done)

    records = [
        run("SGD", 0.1, 96.0),
        run("SGD", 0.3, 94.9),
        run("OCNOpt", 0.1, 94.6),
        run("OCNOpt", 0.3, 95.5),
    ]
    assert digits.unfinished_cells(records) == ""
    assert "1 to 2 seeds" in digits.unfinished_cells([*records, run("SGD", 0.1, 96.0)])
    sgd, ours = digits.range_table(records).splitlines()[2:]
    assert sgd.endswith("| 96.0 | 94.9 |  |  |  | 0.1 – 0.1 (1) | 0.1 – 0.1 (1) |")
    assert ours.endswith("| 94.6 | 95.5 |  |  |  | 0.1 – 0.3 (2) | 0.3 – 0.3 (1) |")


def test_every_range_row_trains_a_little(tmp_path: Path) -> None:
    rows = [row for momentum in (0.0, 0.9) for row in digits.range_rows(momentum)]
    for row in rows:
        run = _runs.Run(row.part, row.optimizer, row.name, 1e-3, 0, row.options, {"epochs": 1, "batch": 718})
        assert math.isfinite(digits.train(run)["train_loss"]), row


def test_digits_shows_the_stability_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "digits.jsonl")
    assert digits.main(["--part", "stability", "--seeds", "0", "--epochs", "1", "--out", out]) == 0
    printed = capsys.readouterr().out
    assert "| SGD |" in printed
    assert "| OCNOpt, linear |" in printed
    assert "| OCNOpt, nonlinear |" in printed


def test_the_live_state_is_timed_against_the_accumulated_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {name: games.CONTENDERS[name] for name in ("accumulated", "live")}
    monkeypatch.setattr(games, "CONTENDERS", chosen)
    monkeypatch.setattr(games, "WARM_UP", 1)
    out = tmp_path / "games.json"
    assert games.main(["--batch", "2", "--threads", "1", "--rounds", "2", "--json", str(out)]) == 0
    assert set(json.loads(out.read_text())["timings"]) == set(chosen)
    assert "live / accumulated = " in capsys.readouterr().out


def test_the_limit_of_the_live_state() -> None:
    def timings(live: float) -> dict[str, Any]:
        rounds = {"accumulated": [1.0, 10.0, 100.0], "live": [live, 10 * live, 100 * live]}
        return {name: games.Timing(1.0, times) for name, times in rounds.items()}

    assert games.verdict(timings(1.1)).endswith("the limit of 1.15 is kept")
    assert games.verdict(timings(1.2)).endswith("the limit of 1.15 is exceeded")


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(ValueError, match="'sdg'"):
        build_optimizer("sdg", gpt.GPT(gpt.SIZES["tiny"], 4), 0.1, {})

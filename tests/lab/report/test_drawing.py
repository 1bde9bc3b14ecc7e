"""Axes, labels and curves."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.report.folders import NAN, of_class, report, text, write_run

from ocnopt.lab.report.chart import spread_out
from ocnopt.lab.report.curves import RESOLUTION, loss_curve
from ocnopt.lab.report.curves import test_curve as curve_of_tests
from ocnopt.lab.report.reading import load
from ocnopt.lab.report.scales import Scale, domain, linear_ticks, log_ticks, tick_text
from ocnopt.lab.report.text import brief, significant, wrapped
from ocnopt.lab.runs import RunFolder

sizes = st.floats(1e-6, 1e6)


def test_scales() -> None:
    assert Scale(2, 6, 100, 0)(3) == 75
    assert Scale(0.01, 1, 0, 100, log=True)(0.1) == pytest.approx(50)
    assert Scale(2, 6, 100, 0).clipped(9) == 0


@pytest.mark.parametrize(
    ("ticks", "expected"),
    [
        (linear_ticks(0, 100, 4), [0, 25, 50, 75, 100]),
        (linear_ticks(-0.3, 0.31, 4), [-0.2, 0, 0.2]),
        (log_ticks(0.9, 1100, 4), [1, 10, 100, 1000]),
        (log_ticks(1e-8, 1.1, 4), [1e-8, 1e-6, 1e-4, 1e-2, 1]),
        (log_ticks(0.1, 1, 4), [0.1, 0.2, 0.5, 1]),
        (log_ticks(2.1, 2.9, 4), [2.2, 2.4, 2.6, 2.8]),
    ],
)
def test_ticks_are_round(ticks: list[float], expected: list[float]) -> None:
    assert ticks == pytest.approx(expected)


@given(st.floats(-1e6, 1e6), sizes)
def test_linear_ticks_are_few_and_inside(low: float, size: float) -> None:
    high = low + size
    ticks = linear_ticks(low, high, 4)
    slack = 1e-6 * size + 1e-9 * abs(low)
    assert 1 <= len(ticks) <= 6
    assert all(low - slack <= tick <= high + slack for tick in ticks)


@given(st.floats(-12, 6), st.floats(0.05, 30))
def test_log_ticks_are_few_and_inside(low: float, decades: float) -> None:
    ticks = log_ticks(10**low, 10 ** (low + decades), 4)
    assert 1 <= len(ticks) <= 6
    assert all(low - 1e-6 <= math.log10(tick) <= low + decades + 1e-6 for tick in ticks)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1))
def test_a_domain_holds_its_values_and_is_never_empty(values: list[float]) -> None:
    low, high = domain(values, log=False)
    assert low < high
    assert low <= min(values)
    assert max(values) <= high


@given(st.lists(st.tuples(st.floats(-50, 250), st.sampled_from([13.0, 26.0])), min_size=1, max_size=7))
def test_labels_do_not_overlap_and_keep_their_order(labels: list[tuple[float, float]]) -> None:
    wanted, heights = [y for y, _ in labels], [height for _, height in labels]
    places = spread_out(wanted, heights, 0, 200)
    order = sorted(range(len(labels)), key=lambda i: (wanted[i], i))
    edges = [(places[i] - heights[i] / 2, places[i] + heights[i] / 2) for i in order]
    assert edges[0][0] >= -1e-6
    assert edges[-1][1] <= 200 + 1e-6
    assert all(upper[1] <= lower[0] + 1e-6 for upper, lower in itertools.pairwise(edges))


def test_labels_that_have_room_stay_where_they_are() -> None:
    assert spread_out([150, 20, 80], [13, 13, 13], 0, 200) == [150, 20, 80]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (25000, "25k"), (0.25, "0.25"), (1e-4, "1e−4"), (-3e-5, "−3e−5"), (1234.5, "1234"), (2e7, "2e7")],
)
def test_ticks_are_short(value: float, expected: str) -> None:
    assert tick_text(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(NAN, "–"), (float("inf"), "∞"), (-0.012345, "−0.0123"), (1.5e-12, "1.5e−12"), (3e20, "3e20")],
)
def test_numbers_as_text(value: float, expected: str) -> None:
    assert significant(value) == expected


def test_short_names_keep_what_tells_methods_apart() -> None:
    assert brief("OCNOpt curvature=kronecker feedback=off rank=16") == "OCNOpt kronecker feedback=off rank=16"
    assert wrapped("OCNOpt kronecker feedback=off", 13, 2) == ["OCNOpt", "kronecker…"]
    assert max(map(len, wrapped("x" * 100, 13, 2))) <= 13


def test_a_curve_is_the_mean_over_seeds_with_their_range(tmp_path: Path) -> None:
    for seed, losses in enumerate(([4.0, 2.0], [8.0, 3.0], [3.0, 1.0])):
        write_run(tmp_path / str(seed), seed=seed, losses=losses, step_seconds=0.1 * (seed + 1))
    runs = [load(RunFolder(tmp_path / str(seed))) for seed in range(3)]
    curve = loss_curve(runs, "step")
    assert (curve.x, curve.mean, curve.low, curve.high) == ((10, 20), (5, 2), (3, 1), (8, 3))
    assert loss_curve(runs, "seconds").x == pytest.approx((2, 4))


def test_a_diverged_run_leaves_the_mean_and_is_marked_where_it_was_lost(tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=[4.0, 2.0, 1.0])
    write_run(tmp_path / "b", losses=[6.0, 20.0, NAN], diverged=True)
    curve = loss_curve([load(RunFolder(tmp_path / name)) for name in "ab"], "step")
    assert curve.mean == (5, 11, 1)
    assert curve.lost == ((20, 20),)


def test_many_steps_are_averaged_evenly(tmp_path: Path) -> None:
    count = 10 * RESOLUTION
    write_run(tmp_path / "a", losses=[float(i) for i in range(1, count + 1)])
    curve = loss_curve([load(RunFolder(tmp_path / "a"))], "step")
    bins = [5.5 + 10 * i for i in range(RESOLUTION)]
    assert curve.x == pytest.approx([10 * value for value in bins])
    width = RESOLUTION // 8
    assert curve.mean == pytest.approx([statistics.mean(bins[max(0, i + 1 - width) : i + 1]) for i in range(len(bins))])


def test_the_noise_of_single_batches_is_smoothed_and_a_test_accuracy_is_not(tmp_path: Path) -> None:
    write_run(tmp_path / "a", losses=[1.0, 3.0] * 16, accuracy=0.5)
    run = load(RunFolder(tmp_path / "a"))
    losses = loss_curve([run], "step").mean
    assert losses[0] == 1
    assert losses[3:] == (2.0,) * 29  # a window of four
    assert curve_of_tests([run], "accuracy", "step").mean == pytest.approx([0.5 * i / 32 for i in range(2, 33, 2)])


def test_no_deviation_reaches_beyond_what_an_accuracy_can_be(tmp_path: Path) -> None:
    """98 ± 3 % is drawn up to 100 %, where the scale ends, with its dot at 98 %."""
    for seed, accuracy in enumerate((0.95, 0.99, 1.0)):
        write_run(tmp_path / "runs" / f"a{seed}", seed=seed, accuracy=accuracy)
        write_run(tmp_path / "runs" / f"b{seed}", label="SGDm", seed=seed, accuracy=0.9)
    root = report(tmp_path / "runs")
    first, _ = of_class(root, "whisker")
    left, right = (float(x) for x in of_class(first, "range")[0].get("d", "")[1:].split(" 8H"))
    scale = Scale(0.9, 1.0, 4, 96)
    assert (left, right) == pytest.approx((scale(0.98 - 0.0264575), 96), abs=0.06)
    assert float(next(first.iter("circle")).get("cx", "")) == pytest.approx(scale(0.98), abs=0.06)
    ticks = [text(tick) for tick in of_class(root, "end")]
    assert max(float(tick.removesuffix(" %")) for tick in ticks if tick.endswith(" %")) == 100

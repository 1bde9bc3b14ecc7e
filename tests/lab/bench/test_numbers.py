"""What is worked out from times: ratios, amortised means, exponents, phases that add up."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch

from ocnopt import phases
from ocnopt.lab.bench import Findings, Settings
from ocnopt.lab.bench.benchmark import save
from ocnopt.lab.bench.breakdown import PHASES, Stopwatch, against, middle
from ocnopt.lab.bench.growth import Growth, fit
from ocnopt.lab.bench.results import Comparison, Refresh, Result
from ocnopt.lab.bench.tables import of_comparison, of_growth
from ocnopt.lab.bench.timing import Spread, Turns, ratio

CPU = torch.device("cpu")


def result(optimizer: str, times: list[float], *, graphed: bool = False, **more: object) -> Result:
    return Result("fcn", 8, optimizer, optimizer.upper(), graphed, times, 1.0, **more)  # type: ignore[arg-type]


def test_a_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    slow_machine = [1.0, 10.0, 100.0]
    assert ratio([2 * slow_machine[0], 3 * slow_machine[1], 4 * slow_machine[2]], slow_machine) == (2.5, 3.0, 3.5)


def test_ratios_are_to_baselines_of_the_same_kind_and_to_eager_sgd_beside_graphs() -> None:
    eager, graphed = result("sgd", [8.0, 8.0]), result("sgd", [2.0, 2.0], graphed=True)
    adam, ours = result("adam", [4.0, 4.0], graphed=True), result("ours", [3.0, 3.0], graphed=True)
    found = Comparison([eager, graphed, adam, ours]).ratios(ours)
    assert {name: spread.median for name, spread in found.items()} == {"sgd": 1.5, "adam": 0.75, "sgd, eager": 0.375}
    assert set(Comparison([eager]).ratios(eager)) == {"sgd"}


def test_memory_is_compared_too() -> None:
    sgd, adam = result("sgd", [1.0, 1.0], peak_bytes=2**20), result("adam", [1.0, 1.0], peak_bytes=2**21)
    ours, blind = result("ours", [1.0, 1.0], peak_bytes=3 * 2**20), result("blind", [1.0, 1.0])
    comparison = Comparison([sgd, adam, ours, blind])
    assert comparison.memory_ratios(ours) == {"sgd": 3.0, "adam": 1.5}
    assert comparison.memory_ratios(blind) == {}
    assert ours.peak_mib == 3.0


def test_headings_say_what_is_compared() -> None:
    (table,) = of_comparison(Comparison([result("sgd", [1.0, 1.0]), result("adam", [1.0, 1.0])]))
    assert table.headings[3:] == ["time × sgd", "time × adam", "MiB", "memory × sgd", "memory × adam"]


def test_a_refresh_is_spread_over_a_hundred_steps() -> None:
    at_once = Refresh(110.0)
    assert at_once.amortised(10.0) == pytest.approx(11.0)
    assert at_once.worst(10.0) == 11.0
    period = Refresh(50.0, [10.0] * 99 + [50.0])
    assert period.amortised(7.0) == pytest.approx(10.4)  # of single steps, not of rounds
    assert period.worst(7.0) == 5.0


def test_amortised_means_are_compared_with_those_of_ekfac() -> None:
    ekfac, ours = (result(n, [t, t], refresh=Refresh(r)) for n, t, r in (("ekfac", 10.0, 10.0), ("ours", 10.0, 510.0)))
    comparison = Comparison([ekfac, ours])
    assert comparison.amortised_to_ekfac(ours) == pytest.approx(1.5)
    assert Comparison([ours]).amortised_to_ekfac(ours) is None
    captured = [
        result(n, [t, t], graphed=True, refresh=Refresh(t)) for n, t in (("ekfac-captured", 2.0), ("ours", 3.0))
    ]
    assert Comparison([ekfac, *captured]).amortised_to_ekfac(captured[1]) == pytest.approx(1.5)
    assert Comparison([ekfac, captured[1]]).amortised_to_ekfac(captured[1]) is None
    times, refreshes = of_comparison(comparison)
    assert len(times.rows) == 2
    assert refreshes.rows[1][1:] == ["10.00", "510.00", "at once", "15.00", "1.50", "51.00"]


def test_whoever_ran_out_of_memory_is_in_the_table_without_numbers() -> None:
    (table,) = of_comparison(Comparison([result("sgd", [1.0, 1.0]), result("ours", [], error="out of memory")]))
    assert set(table.rows[1][1:]) == {"–"}
    assert table.notes == ["OURS: out of memory."]


def test_why_there_is_no_graph_is_said() -> None:
    results = [result("sgd", [1.0, 1.0], graphed=True, reason="it rains"), result("adam", [1.0, 1.0], graphed=True)]
    (table,) = of_comparison(Comparison(results))
    assert table.notes == ["SGD, graphed is not in a graph: it rains."]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 2.0])
def test_the_exponent_of_a_power_is_found(exponent: float) -> None:
    sizes = [2, 4, 8, 16]
    found = fit(sizes, [3.0 * n**exponent for n in sizes])
    assert found is not None
    assert found.p == pytest.approx(exponent, abs=1e-12)
    assert found.a == pytest.approx(3.0)


def test_times_that_are_not_positive_have_no_logarithm() -> None:
    sizes, own = [1, 2, 4, 8], [-1.0, 2.0, 8.0, 32.0]
    found = fit(sizes, own)
    assert found is not None
    assert found.p == pytest.approx(2.0)
    assert found.points == 3
    growth = Growth("rank", "fcn", "ours", "Ours", sizes, [4.0, math.nan, math.nan, 4.0], [1.0] * 4, own)
    assert of_growth([growth]).rows[0][1:] == ["4.00", "–", "–", "4.00", "–", "n^2.00 (3 of 4)"]
    assert fit([1, 2, 4], [0.0, 1.0, 2.0]) is None  # a line through two points says nothing


def test_the_own_part_grows_otherwise_than_the_step() -> None:
    sizes = [1, 2, 4, 8]
    growth = Growth("rank", "fcn", "ours", "Ours", [], [], [], [])
    for n in sizes:
        growth.add(n, [100.0 + 2 * n, 200.0 + 2 * n, 900.0 + 2 * n], [100.0, 200.0, 900.0])
    assert growth.own_ms == [2 * n for n in sizes]
    assert growth.own is not None
    assert growth.whole is not None
    assert growth.own.p == pytest.approx(1.0)
    assert growth.whole.p < 0.1
    assert of_growth([growth]).rows[0][-1] == "n^1.00"
    assert growth.document()["fits"]["own"]["p"] == pytest.approx(1.0)


def test_the_own_part_is_the_median_of_the_differences_within_rounds() -> None:
    growth = Growth("rank", "fcn", "ours", "Ours", [], [], [], [])
    growth.add(1, [12.0, 30.0, 21.0], [10.0, 5.0, 20.0])
    assert (growth.step_ms, growth.gradient_ms, growth.own_ms) == ([21.0], [10.0], [2.0])


def test_turns_rotate_and_end_with_the_budget() -> None:
    order: list[str] = []
    works = {name: lambda name=name: order.append(name) for name in "abc"}
    found = Turns(rounds=3).take(works, CPU)
    assert "".join(order) == "abcbcacab"
    assert {len(times) for times in found.values()} == {3}
    assert Turns(rounds=3).take({}, CPU) == {}
    assert len(Turns(rounds=9, budget=0.0).take(works, CPU)["a"]) == 2  # one has no spread


def test_a_phase_has_the_time_of_its_own_and_not_of_those_inside() -> None:
    watch = Stopwatch(CPU)
    start = time.perf_counter()
    with phases.told(watch), phases.ROLLOUT:
        time.sleep(0.02)
        with phases.UPDATE:
            time.sleep(0.04)
        time.sleep(0.02)
    whole = 1e3 * (time.perf_counter() - start)
    assert watch.ms["update"] >= 40
    assert watch.ms["rollout"] >= 40
    assert sum(watch.ms.values()) == pytest.approx(whole, abs=1.0)


def test_the_middle_half_counts() -> None:
    steps = [{"forward": ms, "update": 1.0} for ms in (1.0, 2.0, 4.0, 1000.0)]
    found = middle(steps)
    assert set(found) == set(PHASES)
    assert (found["forward"], found["update"], found["rollout"]) == (3.0, 1.0, 0.0)


def test_capture_is_what_forward_and_backward_take_beyond_those_of_nobody() -> None:
    bare = dict.fromkeys(PHASES, 0.0) | {"forward": 2.0, "backward": 4.0}
    ours = bare | {"forward": 2.5, "backward": 5.0, "update": 1.0}
    found = against(bare, ours)
    assert (found["forward"], found["backward"], found["capture"]) == (2.0, 4.0, 1.5)
    assert sum(found.values()) == sum(ours.values())


def test_the_file_has_no_nan(tmp_path) -> None:  # type: ignore[no-untyped-def]
    failed = result("ours", [], error="out of memory")
    findings = Findings(Settings(), results=[failed, result("sgd", [1.0, 3.0])])
    save(findings, tmp_path / "new" / "bench.json")
    document = json.loads((tmp_path / "new" / "bench.json").read_text(), parse_constant=pytest.fail)
    assert document["settings"]["budget"] is None
    assert [row["optimizer"] for row in document["results"]] == ["ours", "sgd"]
    assert document["results"][1]["median_ms"] == 2.0
    assert Spread.of([1.0, 3.0]) == (1.5, 2.0, 2.5)

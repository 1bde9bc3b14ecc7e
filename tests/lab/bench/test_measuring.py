"""The benchmark end to end, on networks that are as small as they get."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ocnopt.curvature.layer import Layer
from ocnopt.lab import models
from ocnopt.lab.bench import Settings, benchmark, breakdown, contenders, inside, measure, networks, timing
from ocnopt.lab.bench.contenders import CONTENDERS, REFRESH, USUAL, choose, find
from ocnopt.lab.bench.growth import WAYS, sizes_of
from ocnopt.lab.bench.networks import NETWORKS, Network, loss_of
from ocnopt.lab.bench.training import Setup, Training
from ocnopt.lab.schema import ConfigError

CPU = torch.device("cpu")
TINY = Network("fcn", (6,), 3, {"depth": 3, "width": 4}, {"depth": ("depth", (2, 3, 4, 5))})
PEERS = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None, reason="pytorch-optimizer is not installed"
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(networks.NETWORKS, "fcn", TINY)


def quick(**more: Any) -> Settings:
    return Settings(**{"networks": ("fcn",), "batches": (8,), "rounds": 2, "memory": False, "device": "cpu", **more})


# --- contenders ---


@pytest.mark.parametrize("name", [pytest.param(n, marks=PEERS) if c.package else n for n, c in CONTENDERS.items()])
def test_every_contender_takes_steps_and_refreshes_when_asked(name: str) -> None:
    training = Setup(TINY, 8, CPU).build(CONTENDERS[name])
    for _ in range(3):
        training.step()
    training.pause_refreshes()
    before = [p.clone() for p in training.model.parameters()]
    training.step()
    if training.contender.interval is not None:
        training.refresh()
    training.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))


@pytest.mark.parametrize("name", ["ekfac", "kronecker-linear-1", pytest.param("soap", marks=PEERS)])
def test_bases_change_in_a_refresh_alone(name: str) -> None:
    training = Setup(TINY, 8, CPU).build(CONTENDERS[name])

    def bases() -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for state in training.optimizer.state.values():  # type: ignore[union-attr]
            found += [state[key].clone() for key in ("U_A", "input_basis") if key in state]
            found += [q.clone() for q in state.get("Q") or () if len(q)]
        return found

    def same(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))

    for _ in range(3):
        training.step()
    training.pause_refreshes()
    first = bases()
    training.step()
    assert first
    assert same(first, bases())
    training.batch = training.batch[0].roll(1, 1), training.batch[1]
    training.refresh()
    second = bases()
    assert not same(first, second)
    training.step()
    assert same(second, bases())


def test_names_patterns_and_any_rank() -> None:
    assert [c.name for c in find("identity-nonlinear-32")] == ["identity-nonlinear-32"]
    assert {c.name for c in find("adaptive-linear-*")} == {f"adaptive-linear-{rank}" for rank in ("1", "8", "full")}
    assert len(find("all")) == len(CONTENDERS)
    assert [c.name for c in choose(["ekfac", "sgd"])[0]] == ["sgd", "adam", "ekfac"]
    curvatures, feedbacks = ("identity", "adaptive", "kronecker"), ("linear", "nonlinear")
    asked = {f"{c}-off" for c in curvatures} | {
        f"{c}-{f}-{r}" for c in curvatures for f in feedbacks for r in ("1", "8", "full")
    }
    assert asked < set(CONTENDERS)
    assert set(USUAL) < set(CONTENDERS)


def test_whoever_is_not_installed_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = replace(CONTENDERS["soap"], package="no_such_package")
    monkeypatch.setitem(contenders.CONTENDERS, "soap", missing)
    findings = measure(quick(optimizers=("soap",)))
    assert findings.missing == ["SOAP is left out: it comes from the package no-such-package, not installed here"]
    assert [r.optimizer for r in findings.results] == ["sgd", "adam"]


def test_the_networks_are_what_they_are_called() -> None:
    assert len(list(NETWORKS["cnn"].build().modules())) == len(list(models.build("cnn", (1, 28, 28), 10).modules()))
    transformer = NETWORKS["transformer"].build()
    blocks = [m for m in transformer.modules() if isinstance(m, models.TransformerBlock)]
    assert [m.mlp_in.in_features for m in blocks] == [256] * 6
    x, y = NETWORKS["transformer"].sample(2)
    assert loss_of(transformer(x), y).item() == pytest.approx(math.log(256), abs=0.6)
    for way in WAYS:
        assert len(sizes_of(way, "transformer", 128)) >= 4


# --- measuring ---


def test_results_phases_and_file(tmp_path: Path) -> None:
    settings = quick(optimizers=("identity-nonlinear-2", "kronecker-off", "ekfac"), phases=True, rounds=4)
    findings = measure(settings)
    document = json.loads(json.dumps(findings.document(), allow_nan=True))
    assert {"torch", "device", "threads", "commit", "python"} <= set(document["environment"])
    assert [row["optimizer"] for row in document["results"]] == [
        "sgd", "adam", "identity-nonlinear-2", "kronecker-off", "ekfac"
    ]  # fmt: skip
    for row in document["results"]:
        assert len(row["rounds_ms"]) == 4
        assert row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert set(row["ratios"]) == {"sgd", "adam"}
    assert document["results"][0]["ratios"]["sgd"]["median"] == 1.0
    kronecker = document["results"][3]
    assert kronecker["amortised_to_ekfac"] == pytest.approx(
        kronecker["amortised_ms"] / document["results"][4]["amortised_ms"]
    )
    by_name = {row["optimizer"]: row for row in document["phases"]}
    for row in by_name.values():
        assert row["total_ms"] == pytest.approx(sum(row["ms"].values()))
    ours = by_name["identity-nonlinear-2"]["ms"]
    assert all(ours[name] > 0 for name in ("forward", "backward", "gradients", "bellman", "rollout", "update", "rest"))
    assert by_name["sgd"]["ms"]["rest"] == 0 < by_name["sgd"]["ms"]["update"]
    assert by_name["kronecker-off"]["ms"]["rollout"] == 0 < by_name["kronecker-off"]["ms"]["curvature"]


def test_phases_are_all_of_a_step() -> None:
    training = Setup(TINY, 8, CPU).build(CONTENDERS["adaptive-nonlinear-8"])
    training.step()
    found: dict[str, float] = {}
    whole = benchmark.timed(lambda: found.update(breakdown.stopped_step(training)), 1, CPU)
    assert set(found) <= set(breakdown.PHASES)
    assert 0.8 * whole < sum(found.values()) <= whole


def test_a_whole_period_is_timed_step_by_step() -> None:
    (*_, row) = measure(quick(optimizers=("kronecker-off",), period=True)).results
    assert row.refresh is not None
    assert len(row.refresh.period_ms) == REFRESH
    assert row.refresh.refresh_ms == max(row.refresh.period_ms)


def test_in_a_period_layers_are_refreshed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    refreshed, by_step = [0], list[int]()
    renew, timed = Layer.renew, benchmark.timed

    def counted(self: Layer, **found: Any) -> None:
        refreshed[0] += 1
        renew(self, **found)

    def watched(work: Any, *rest: Any) -> float:
        before, ms = refreshed[0], timed(work, *rest)
        by_step.append(refreshed[0] - before)
        return ms

    monkeypatch.setattr(Layer, "renew", counted)
    monkeypatch.setattr(benchmark, "timed", watched)
    measure(quick(optimizers=("kronecker-off",), period=True, rounds=REFRESH))
    period = by_step[-REFRESH:]
    assert max(period) == 1
    assert sum(period) == 3  # every layer once


@pytest.mark.parametrize("period", [True, False])
def test_all_times_are_of_one_clock(monkeypatch: pytest.MonkeyPatch, period: bool) -> None:
    ticks = itertools.count()
    monkeypatch.setitem(timing.CLOCKS, "process", lambda: float(next(ticks)))
    findings = measure(quick(optimizers=("kronecker-off",), clock="process", period=period, phases=True))
    row, phases = findings.results[-1], next(iter(findings.breakdowns.values()))[-1]
    assert row.refresh is not None
    assert {*row.rounds_ms, row.first_ms, row.refresh.refresh_ms} == {1e3}
    assert phases.total % 1e3 == 0 < phases.total


def test_graphs_beside_eager_baselines() -> None:
    findings = measure(quick(optimizers=("identity-linear-1", "muon", "ekfac"), graphed=True))
    assert [(r.optimizer, r.graphed) for r in findings.results] == [
        ("sgd", False), ("sgd", True), ("adam", False), ("adam", True), ("identity-linear-1", True), ("muon", False),
        ("ekfac", False), ("ekfac-captured", True),
    ]  # fmt: skip
    *reasons, stands_in = [r.reason for r in findings.results]
    assert "graphs are a matter of CUDA" in (stands_in or "")
    assert "graphs are a matter of CUDA" in (reasons[1] or "")
    assert reasons[0] is None
    assert reasons[-2:] == [
        "it is two optimizers, and a graph is about one",
        "it counts its steps in Python, to know when a refresh is due",
    ]
    times, _ = findings.tables()
    assert "EKFAC is not in a graph: it counts its steps in Python, to know when a refresh is due." in times.notes


def test_what_stands_in_for_ekfac_in_graphs_takes_its_steps() -> None:
    """On a network without norm layers, and but for momentum, which goes through the metric as gradients do."""
    found = []
    for name in ("ekfac", "ekfac-captured"):
        torch.manual_seed(0)
        training = Setup(TINY, 8, CPU).build(CONTENDERS[name])
        start = [p.detach().clone() for p in training.model.parameters()]
        for group in training.optimizer.param_groups:
            group.update(lr=0.1, momentum=0.0)
        training.take(3)
        found.append([p.detach() - old for p, old in zip(training.model.parameters(), start, strict=True)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)
    assert min(float(change.abs().max()) for change in found[0]) > 1e-2


def test_growth_with_the_rank_is_about_those_that_have_one() -> None:
    findings = measure(quick(optimizers=("identity-linear-1", "identity-linear-8", "ekfac"), growth=("rank", "depth")))
    ranks, depths = findings.growth
    assert [g.title for g in ranks] == ["OCNOpt identity, linear"]
    assert ranks[0].sizes == [1, 2, 4, 8]
    assert [g.optimizer for g in depths] == ["sgd", "adam", "identity-linear-1", "identity-linear-8", "ekfac"]
    assert depths[0].sizes == [2, 3, 4, 5]
    assert len(findings.tables()) == 2
    assert findings.results == []


def test_a_title_tells_the_rank_that_the_batch_allows() -> None:
    findings = measure(quick(batches=(4, 8), optimizers=("identity-linear-8",), phases=True))
    titles = [r.title for r in findings.results if r.optimizer == "identity-linear-8"]
    assert titles == ["OCNOpt identity, linear r=8 (4 at batch 4)", "OCNOpt identity, linear r=8"]
    assert [b[-1].title for b in findings.breakdowns.values()] == titles


def test_peak_memory_is_what_weights_gradients_and_state_take(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Network("fcn", (8,), 3, {"depth": 3, "width": 1024})
    monkeypatch.setitem(networks.NETWORKS, "fcn", wide)
    sgd, adam = (r.peak_bytes for r in measure(quick(optimizers=("sgd",), memory=True)).results)
    assert sgd is not None
    assert adam is not None
    weights = 4 * 1024 * 1024
    # weights, gradients, momentum; Adam has one more of them. What malloc keeps for itself comes and goes
    assert 3 * weights < sgd < 7 * weights
    assert 4 * weights < adam < 8 * weights


def allow(monkeypatch: pytest.MonkeyPatch, steps: dict[str, int]) -> None:
    """Contenders run out of memory after so many steps."""
    step, taken = Training.step, Counter[Training]()

    def limited(self: Training) -> None:
        taken[self] += 1
        if taken[self] > steps.get(self.contender.name, 10**9):
            raise torch.OutOfMemoryError("too much")
        step(self)

    monkeypatch.setattr(Training, "step", limited)


@pytest.mark.parametrize("steps", [0, 5], ids=["at once", "in the rounds"])
def test_running_out_of_memory_is_a_result(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    allow(monkeypatch, {"adam": steps})
    findings = measure(quick(optimizers=("sgd",)))
    assert [r.error for r in findings.results] == [None, "out of memory"]
    assert "Adam (fused): out of memory." in findings.tables()[0].notes


def test_everybody_may_run_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, {"sgd": 0, "adam": 0})
    findings = measure(quick(optimizers=("sgd",), phases=True))
    assert [r.error for r in findings.results] == ["out of memory"] * 2
    assert {cell for row in findings.tables()[1].rows for cell in row[1:]} == {"–"}


def test_growth_goes_on_without_whoever_ran_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, {"adam": 3})
    (family,) = measure(quick(optimizers=("sgd",), growth=("depth",))).growth
    assert [all(map(math.isnan, growth.step_ms)) for growth in family] == [False, True]


def test_phases_of_the_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, {"adam": 0})
    _, phases = measure(quick(optimizers=("sgd",), phases=True)).tables()
    assert "–" not in phases.rows[0]
    assert set(phases.rows[1][1:]) == {"–"}


# --- what cannot be meant, and a look inside ---


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"networks": ("lenet",)}, "network must be one of cnn, resnet18, transformer, fcn; got 'lenet'"),
        ({"optimizers": ("identity-liner-1",)}, "did you mean 'identity-linear-1'"),
        ({"rounds": 1}, "rounds must be at least 2"),
        ({"stream": "mine"}, "stream must be default or own"),
        ({"stream": "own", "device": "cpu"}, "stream: own is a matter of CUDA"),
        ({"batches": (1,)}, "batch must be at least 2"),
        ({"growth": ("height",)}, "growth must be one of depth, width, batch, rank; got 'height'"),
        ({"growth": ("depth",), "networks": ("cnn",)}, "cnn has no other depth; networks that have: transformer, fcn"),
        ({"growth": ("rank",), "optimizers": ("adamw",)}, "growth: rank needs an optimizer that has one.*got 'adamw'"),
        ({"growth": ("depth",), "batches": (8, 16)}, "growth is measured at one batch size; got \\(8, 16\\)"),
        ({"growth": ("depth",), "phases": True}, "growth is about eager, ordinary steps as a whole: .* got 'phases'"),
        ({"growth": ("batch",), "optimizers": ("identity-linear-64",)}, "growth: batch begins at 32.*got 'rank 64'"),
        ({"device": "tpu"}, "device must be auto, cpu, cuda or cuda:N"),
        ({"clock": "sundial"}, "clock must be one of wall, process"),
    ],
)
def test_what_cannot_be_meant_is_said_before_anything_runs(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        measure(quick(**changes))


def test_inside_a_step() -> None:
    table = inside.look_inside(quick(), profile="sgd")
    assert any("SGD.step" in row[0] for row in table.rows)
    with pytest.raises(ConfigError, match="kernels are those of a CUDA device; got cpu"):
        inside.look_inside(quick(), kernels="sgd")
    with pytest.raises(ConfigError, match="one optimizer can be looked into at a time; 'all'"):
        inside.look_inside(quick(), profile="all")

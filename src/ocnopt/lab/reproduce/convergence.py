"""Neural ODEs against the clock: the training loss and the test result as a function of the time spent on steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any

from ocnopt.lab.reproduce import continuous, ode_figures
from ocnopt.lab.reproduce.bench import Bench, Finding
from ocnopt.lab.reproduce.continuous import METHODS, TITLES, Column, Found, Place
from ocnopt.lab.runs import RunFolder
from ocnopt.lab.tasks import score

#: where nothing else is asked for at the quick scale: one of each kind
QUICK_COLUMNS = ("mnist", "artwr", "circle")


def run(bench: Bench) -> Finding:
    """Search the grids, then look at the best setting of each optimizer from epoch to epoch."""
    columns = continuous.select(bench)
    if bench.quick and not bench.only:
        columns = [column for column in columns if column.key in QUICK_COLUMNS]
    seeds = bench.seeds(quick=1, full=3)
    found = continuous.search(bench, columns, seeds)
    curves = {place: [curve(run) for run in each.runs] for place, each in found.items()}
    figure = bench.folder / f"convergence-{bench.solver}.png"
    ode_figures.draw_clock(figure, columns, curves)
    rows = [_cells(column, method, found, curves) for column in columns for method in METHODS]
    return Finding(
        title="Neural ODEs: convergence against wall-clock time",
        setting=[
            *continuous.describe(columns, bench, seeds),
            f"Seconds are those of training steps, without evaluations; {bench.workers} at a time on {bench.device}.",
        ],
        data=[
            {"dataset": column.dataset, "method": TITLES[method], "curves": curves[column.key, method]}
            for column in columns
            for method in METHODS
        ],
        headings=("dataset", "method", "ms per step", "ratio to Adam", "result", "seconds to Adam's result"),
        rows=rows,
        verdict=_verdict(columns, curves),
        remarks=[
            "Milliseconds are the median over the logged steps. The paper's figure: a step of OCNOpt takes about as "
            "long as one of Adam on images and series, 1.5 to 2.5 times as long on flows, and it converges "
            "earlier in time."
        ],
        figures={figure.name: "Training loss and test result against seconds"},
    )


Curve = Mapping[str, list[float]]
Curves = Mapping[Place, Sequence[Curve]]


def curve(run: RunFolder) -> dict[str, list[float]]:
    """``seconds, loss`` of the logged steps, ``epoch_seconds, test`` of the epochs, and ``step``, seconds of a step."""
    steps, epochs = run.metrics("step"), run.metrics("epoch")
    pairs = list(pairwise(steps))
    return {
        "seconds": [record["seconds"] for record in steps],
        "loss": [float("nan") if record["loss"] is None else record["loss"] for record in steps],
        "epoch_seconds": [record["seconds"] for record in epochs],
        "test": [score(record) for record in epochs],
        "step": [(b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in pairs],
    }


def _step_time(curves: Sequence[Curve]) -> float:
    return 1e3 * median(value for each in curves for value in each["step"])


def _reached(curves: Sequence[Curve], wanted: float) -> float | None:
    """Seconds until the result is as good, as a mean over seeds; ``None`` if one of them never gets there."""
    times = []
    for each in curves:
        pairs = zip(each["epoch_seconds"], each["test"], strict=True)
        times.append(next((seconds for seconds, value in pairs if value >= wanted), None))
    known = [time for time in times if time is not None]
    return mean(known) if len(known) == len(times) else None


def _adams(column: Column, curves: Curves) -> float:
    return mean(each["test"][-1] for each in curves[column.key, "adam"])


def _cells(column: Column, method: str, found: Mapping[Place, Found], curves: Curves) -> list[str]:
    own, adam = curves[column.key, method], curves[column.key, "adam"]
    reached = _reached(own, _adams(column, curves))
    value = mean(found[column.key, method].tests())
    return [
        column.dataset,
        TITLES[method],
        f"{_step_time(own):.1f}",
        f"{_step_time(own) / _step_time(adam):.2f}",
        f"{value:.3f}" if column.by_loss else f"{value:.2f} %",
        "not reached" if reached is None else f"{reached:.1f}",
    ]


def _verdict(columns: Sequence[Column], curves: Curves) -> str:
    sooner: list[str] = []
    others: list[str] = []
    for column in columns:
        own, adam = (_reached(curves[column.key, m], _adams(column, curves)) for m in ("ocnopt", "adam"))
        is_sooner = own is not None and (adam is None or own < adam)
        (sooner if is_sooner else others).append(column.dataset)
    texts: list[Any] = [f"OCNOpt reaches Adam's final result earlier than Adam does on {', '.join(sooner) or 'none'}"]
    texts += [f"it does not on {', '.join(others)}"] if others else []
    return f"{'; '.join(texts)}."

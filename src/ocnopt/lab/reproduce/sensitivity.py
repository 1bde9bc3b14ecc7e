"""How much the result of training a Neural ODE depends on the learning rate: every run of the grids, as a point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ocnopt.lab.reproduce import continuous, ode_figures
from ocnopt.lab.reproduce.bench import Bench, Finding
from ocnopt.lab.reproduce.continuous import METHODS, TITLES, Column, Found, Place

#: where nothing else is asked for at the quick scale: one of each kind
QUICK_COLUMNS = ("mnist", "artwr", "circle")


def run(bench: Bench) -> Finding:
    """Train with every setting of every grid, once."""
    columns = continuous.select(bench)
    if bench.quick and not bench.only:
        columns = [column for column in columns if column.key in QUICK_COLUMNS]
    seeds = bench.seeds(quick=1, full=1)
    found = continuous.search(bench, columns, seeds)
    figure = bench.folder / f"sensitivity-{bench.solver}.png"
    points = {place: _points(each) for place, each in found.items()}
    ode_figures.draw_scatter(figure, columns, points)
    return Finding(
        title="Neural ODEs: what comes out against the learning rate",
        setting=continuous.describe(columns, bench, seeds),
        data=[
            {"dataset": column.dataset, "method": TITLES[method], "points": points[column.key, method]}
            for column in columns
            for method in METHODS
        ],
        headings=("dataset", "method", "best", "median", "worst", "usable"),
        rows=[_cells(column, method, points) for column in columns for method in METHODS],
        verdict=_verdict(columns, points),
        remarks=[
            "Test accuracy in percent, of flows the negative log-likelihood, over all settings of the grid with one "
            "seed. Usable: within 5 points (flows: 0.3) of the best that any optimizer reached; a run that failed is "
            "none."
        ],
        figures={figure.name: "Every setting of the grids: result against learning rate"},
    )


Points = Mapping[Place, Sequence[Mapping[str, Any]]]


def _points(found: Found) -> list[dict[str, Any]]:
    return [{"lr": o.lr, "options": dict(o.options), "test": continuous.test_value(r)} for o, r in found.tried]


def _ranked(column: Column, points: Sequence[Mapping[str, Any]]) -> list[float]:
    """From the best to the worst."""
    return sorted((point["test"] for point in points), reverse=not column.by_loss)


def _usable(column: Column, method: str, points: Points) -> tuple[int, int]:
    tops = [_ranked(column, points[column.key, each])[0] for each in METHODS]
    values = _ranked(column, points[column.key, method])
    if column.by_loss:
        return sum(value <= min(tops) + 0.3 for value in values), len(values)
    return sum(value >= max(tops) - 5.0 for value in values), len(values)


def _cells(column: Column, method: str, points: Points) -> list[str]:
    values = _ranked(column, points[column.key, method])
    shown = [values[0], values[len(values) // 2], values[-1]]
    usable, of = _usable(column, method, points)
    return [column.dataset, TITLES[method], *(f"{value:.2f}" for value in shown), f"{usable} of {of}"]


def _verdict(columns: Sequence[Column], points: Points) -> str:
    shares = {method: [_usable(column, method, points) for column in columns] for method in METHODS}
    texts = [f"{TITLES[method]} {sum(u for u, _ in s)} of {sum(n for _, n in s)}" for method, s in shares.items()]
    return (
        f"Usable settings, over all datasets: {', '.join(texts)}. The paper's figure shows OCNOpt's results close "
        "together where those of the others are scattered, and gives no numbers."
    )

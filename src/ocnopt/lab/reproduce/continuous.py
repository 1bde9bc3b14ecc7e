"""What the experiments on Neural ODEs share: the columns of Table II, their recipes, and the search for settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ocnopt.lab.comparison import hold_out
from ocnopt.lab.config import RunConfig, load_toml
from ocnopt.lab.data import find_entry
from ocnopt.lab.optimizers import OptimizerConfig
from ocnopt.lab.recipes import Recipe, find_recipe, parse_recipe
from ocnopt.lab.reproduce.bench import Bench
from ocnopt.lab.runs import RunFolder
from ocnopt.lab.schema import Scalar
from ocnopt.lab.tasks import score

#: the lines of Table II, by the names of the lab
METHODS = ("adam", "sgdm", "ocnopt")
TITLES = {"adam": "Adam", "sgdm": "SGD", "ocnopt": "OCNOpt"}


@dataclass(frozen=True)
class Column:
    """A column of Tables II and V: test accuracy in percent or, of a flow, the negative log-likelihood.

    ``paper`` holds Adam, SGD and OCNOpt by solver.
    """

    key: str
    network: str
    dataset: str
    paper: Mapping[str, tuple[float, float, float]]

    @property
    def by_loss(self) -> bool:
        return find_entry(self.dataset).task == "density"

    def in_paper(self, solver: str) -> dict[str, float]:
        return dict(zip(METHODS, self.paper.get(solver, ()), strict=False))

    def best(self, values: Mapping[str, float]) -> float:
        return min(values.values()) if self.by_loss else max(values.values())


def _column(key: str, network: str, dataset: str, runge_kutta: Any, adams: Any) -> Column:
    return Column(key, network, dataset, {"dopri5": runge_kutta, "implicit_adams": adams})


COLUMNS = (
    _column("mnist", "conv_ode", "MNIST", (98.83, 98.68, 98.99), (98.86, 98.71, 98.95)),
    _column("svhn", "conv_ode", "SVHN", (91.92, 93.34, 95.77), (91.76, 94.19, 95.76)),
    _column("cifar10", "conv_ode", "CIFAR10", (77.41, 76.42, 79.11), (77.22, 76.48, 79.00)),
    _column("spoad", "ode_rnn", "SpokenArabicDigits", (94.64, 97.70, 97.41), (95.33, 97.80, 97.45)),
    _column("artwr", "ode_rnn", "ArticularyWordRecognition", (84.14, 85.82, 90.23), (86.28, 87.05, 89.50)),
    _column("chart", "ode_rnn", "CharacterTrajectories", (93.29, 95.93, 96.63), (88.83, 95.38, 97.17)),
    _column("circle", "ffjord", "Circle", (0.90, 0.94, 0.86), (0.90, 0.93, 0.86)),
    _column("gas", "ffjord", "Gas", (-6.42, -4.58, -7.55), (-6.51, -4.69, -7.41)),
    _column("miniboone", "ffjord", "Miniboone", (13.10, 13.75, 12.50), (13.29, 13.77, 12.37)),
)


#: a column and a method
Place = tuple[str, str]


@dataclass(frozen=True)
class Quick:
    """The quick scale of one column: smaller networks, fewer samples, and shorter series."""

    epochs: int
    data: Mapping[str, Any] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=dict)


_IMAGES = {"batch_size": 128, "train_limit": 12_500, "validation": 0.2}
_SERIES = {"batch_size": 64, "missing": 0.3, "validation": 0.2}
_DIRECT = {"gradient": "discretize"}  # half the time of the adjoint method where the steps of a solve fit into memory
_SMALL = {**_DIRECT, "channels": 16}
#: Gas is left out: it has 40 times as many samples as the others
QUICK = {
    "mnist": Quick(8, _IMAGES, _SMALL),
    "svhn": Quick(10, _IMAGES, _SMALL),
    "cifar10": Quick(10, _IMAGES, _SMALL),
    "spoad": Quick(20, {**_SERIES, "stride": 4, "train_limit": 1500, "test_limit": 1000}, _DIRECT),
    "artwr": Quick(60, {**_SERIES, "stride": 6}, _DIRECT),
    "chart": Quick(25, {**_SERIES, "stride": 8}, _DIRECT),
    "circle": Quick(
        40,
        {"batch_size": 128, "train_limit": 5120, "test_limit": 2000},
        {**_DIRECT, "rtol": 1e-4, "atol": 1e-4},
    ),
    "miniboone": Quick(
        20,
        {"batch_size": 128, "test_limit": 1000},
        {**_DIRECT, "width": 64, "rtol": 1e-4, "atol": 1e-4, "test_trace": "rademacher"},
    ),
}
#: the damping is the default of OCNOpt: it was not searched for
KRONECKER: dict[str, Scalar] = {
    "curvature": "kronecker",
    "refresh_every": 20,
    "factor_every": 20,
    "factor_decay": 0.5,
}
#: as many settings for each
QUICK_GRIDS: dict[str, dict[str, Any]] = {
    "adam": {"lr": [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]},
    "sgdm": {"lr": [1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0]},
    "ocnopt": {**KRONECKER, "feedback": "linear", "lr": [1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1]},
}


def select(bench: Bench) -> list[Column]:
    """The columns that were asked for, of those that the scale has."""
    return bench.select([column for column in COLUMNS if not bench.quick or column.key in QUICK])


def recipe_of(column: Column, bench: Bench) -> Recipe:
    """The recipe that comes along or, at the quick scale, a smaller one; with the solver that was asked for."""
    table = load_toml(find_recipe(f"table2-{column.key}"))
    if bench.quick:
        quick = QUICK[column.key]
        table = {
            **table,
            "title": f"{column.dataset}, {column.network}, quick",
            "data": {"name": column.dataset, **quick.data},
            "network": {**table["network"], **quick.network},
            "training": {**table["training"], "epochs": quick.epochs, "schedule": "cosine", "log_every": 1},
            "grids": QUICK_GRIDS,
        }
    return parse_recipe(bench.resized({**table, "network": {**table["network"], "solver": bench.solver}}))


@dataclass(frozen=True)
class Found:
    """What was found for one method on one column.

    Attributes:
        tried: every setting of the grid with its run, all with the first seed.
        best: the setting with the best score on held-out samples.
        runs: those of the best setting, one a seed.
    """

    tried: Sequence[tuple[OptimizerConfig, RunFolder]]
    best: OptimizerConfig
    runs: Sequence[RunFolder]

    def tests(self) -> list[float]:
        """Of every seed, as the paper counts."""
        return [test_value(run) for run in self.runs]

    @property
    def is_at_an_end(self) -> bool:
        """Might a wider grid of learning rates do better?"""
        rates = [optimizer.lr for optimizer, _ in self.tried]
        return self.best.lr in (min(rates), max(rates))


def search(bench: Bench, columns: Sequence[Column], seeds: Sequence[int]) -> dict[Place, Found]:
    """Run every grid with the first seed, and the best setting of each with the others; by column and method."""
    within = replace(bench, folder=bench.folder / bench.solver)  # runs of another solver have the same names
    places = [(column.key, method) for column in columns for method in METHODS]
    recipes = {column.key: recipe_of(column, bench) for column in columns}
    grids = {place: list(recipes[place[0]].grids[place[1]].points()) for place in places}

    def train(wanted: Mapping[Place, Sequence[tuple[OptimizerConfig, int]]]) -> dict[Place, list[RunFolder]]:
        runs = iter(within.train([_config(recipes[p[0]], o, seed) for p in wanted for o, seed in wanted[p]]))
        return {place: [next(runs) for _ in wanted[place]] for place in wanted}

    first = train({place: [(optimizer, seeds[0]) for optimizer in grids[place]] for place in places})
    tried = {place: list(zip(grids[place], first[place], strict=True)) for place in places}
    best = {place: max(tried[place], key=lambda pair: rank(pair[1])) for place in places}
    again = train({place: [(best[place][0], seed) for seed in seeds[1:]] for place in places})
    return {place: Found(tried[place], best[place][0], [best[place][1], *again[place]]) for place in places}


def _config(recipe: Recipe, optimizer: OptimizerConfig, seed: int) -> RunConfig:
    return hold_out(recipe.run).with_optimizer(optimizer).with_seed(seed)


def held_out(run: RunFolder) -> float:
    return score(run.metrics("epoch")[-1], "validation")


def held_out_loss(run: RunFolder) -> float | None:
    """``None`` of a run that failed."""
    loss: float | None = run.metrics("epoch")[-1]["validation_loss"]
    return loss


def rank(run: RunFolder) -> tuple[float, float]:
    """By what settings are chosen: where a few held-out samples are all answered, how surely decides."""
    loss = held_out_loss(run)
    return held_out(run), -math.inf if loss is None else -loss


def test_value(run: RunFolder) -> float:
    """As the paper counts: percent of the test samples, or their negative log-likelihood."""
    final = run.final()
    assert final is not None
    return 100 * score(final) if "test_accuracy" in final else -score(final)


def describe(columns: Sequence[Column], bench: Bench, seeds: Sequence[int]) -> list[str]:
    """The setting of an experiment, for its page."""
    where = "" if bench.quick else " Networks, epochs and grids are those of the recipes `table2-*`."
    sentences = [
        f"Scale: {bench.scale}. Solver {bench.solver}.{where} Seeds {', '.join(map(str, seeds))}; settings are "
        "chosen with the first of them, on held-out samples. OCNOpt has Kronecker curvature along the ODE "
        "and linear feedback."
    ]
    for column in columns:
        recipe = recipe_of(column, bench)
        run = hold_out(recipe.run)
        options = "".join(f", {key} {value}" for key, value in run.network.options.items() if key != "solver")
        series = f", {run.data.missing:.0%} of the observations lost" if run.data.missing is not None else ""
        series += f", every {run.data.stride}th time" if run.data.stride > 1 else ""
        sentences.append(
            f"{column.dataset}: {bench.samples(run.data)}{series}; {run.network.name}{options}; "
            f"{run.training.epochs} epochs, batch {run.data.batch_size}, curvature every "
            f"{recipe.grids['ocnopt'].choices['refresh_every'][0]} steps."
        )
    grids = recipe_of(columns[0], bench).grids
    rates = "; ".join(f"{TITLES[key]} {', '.join(f'{lr:g}' for lr in grids[key].choices['lr'])}" for key in METHODS)
    schedule = recipe_of(columns[0], bench).run.training.schedule
    return [*sentences, f"Learning rates ({schedule}): {rates}."]

"""Table IV and its figure: the final time T of a Neural ODE, fixed, or learned along with the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from ocnopt.lab.config import RunConfig
from ocnopt.lab.optimizers import OptimizerConfig, find_kind, read_optimizer
from ocnopt.lab.recipes import Recipe
from ocnopt.lab.reproduce import continuous, ode_figures
from ocnopt.lab.reproduce.bench import Bench, Finding
from ocnopt.lab.reproduce.continuous import KRONECKER
from ocnopt.lab.reproduce.tuning import spread, test_accuracy
from ocnopt.lab.runs import RunFolder
from ocnopt.lab.schema import Scalar

TITLES = {"off": "fixed", "first_order": "adjoint method", "feedback": "closed form"}


@dataclass(frozen=True)
class Arm:
    """A way to choose T, where it begins, and the optimizer of the parameters."""

    method: str
    T: float
    optimizer: str = "ocnopt"

    @property
    def title(self) -> str:
        return f"{find_kind(self.optimizer, 'optimizer').title}, {TITLES[self.method]}"

    @property
    def name(self) -> str:
        return f"{self.title}, T = {self.T:g}"

    @property
    def kept(self) -> Arm:
        """The same optimizer with T = 1 from the first step to the last."""
        return Arm("off", 1.0, self.optimizer)


FIXED = tuple(Arm("off", T) for T in (1.0, 0.75, 0.5, 0.2))
LEARNED = tuple(
    Arm(method, T, optimizer)
    for method, optimizer in (("feedback", "ocnopt"), ("first_order", "ocnopt"), ("first_order", "adam"))
    for T in (1.0, 0.2)
)
#: relative training time and accuracy in percent
IN_PAPER = {Arm("feedback", 1.0): ("81", "77.82"), Arm("first_order", 1.0, "adam"): ("96", "76.61")}
ARMS = (*FIXED, Arm("off", 1.0, "adam"), *LEARNED)

#: the price of time c and the step size of T; all have the same
SETTINGS: dict[str, Scalar] = {"time_penalty": 0.05, "time_lr": 0.05, "time_every": 1}

#: at the quick scale the rates that Table II has chosen for MNIST; at the full one OCNOpt has what its recipe says, and
#: Adam the middle of its grid
QUICK: dict[str, dict[str, Scalar]] = {"ocnopt": {**KRONECKER, "lr": 0.03}, "adam": {"lr": 0.03}}


@dataclass(frozen=True)
class Part:
    """A dataset, with the settings of a column of Table II."""

    network: str
    dataset: str
    column: str


PARTS = (
    Part("conv_ode", "CIFAR10", "cifar10"),
    Part("conv_ode", "MNIST", "mnist"),
    Part("conv_ode", "DIGITS", "mnist"),  # comes with scikit-learn, and takes minutes anywhere
)


def run(bench: Bench) -> Finding:
    """Train with T fixed at several values, and learned by both methods from two."""
    part = (bench.select(PARTS) if bench.only else PARTS)[0]
    seeds = bench.seeds(quick=2, full=3)
    within = replace(bench, folder=bench.folder / bench.solver)
    runs = iter(within.train([_config(part, arm, seed, bench) for seed in seeds for arm in ARMS]))
    by_seed = [[next(runs) for _ in ARMS] for _ in seeds]
    found = {arm: [row[i] for row in by_seed] for i, arm in enumerate(ARMS)}
    figure = bench.folder / f"horizon-{bench.solver}.png"
    paths = {arm: [_path(run) for run in found[arm]] for arm in LEARNED}
    times = {arm: _relative_time(found, arm) for arm in ARMS}
    fixed = {arm.T: (mean(times[arm]), mean(map(test_accuracy, found[arm]))) for arm in FIXED}
    styles = {arm: ("--" if arm.method == "first_order" else "-", arm.optimizer) for arm in LEARNED}
    ode_figures.draw_horizons(figure, fixed, [(arm.title, *styles[arm], paths[arm]) for arm in LEARNED])
    return Finding(
        title="Table IV: the final time of a Neural ODE, learned",
        setting=_describe(part, bench, seeds),
        data=[
            {
                "optimizer": arm.optimizer,
                "method": TITLES[arm.method],
                "T": arm.T,
                "relative_time": times[arm],
                "accuracy": [test_accuracy(run) for run in found[arm]],
                "path": paths.get(arm),
            }
            for arm in ARMS
        ],
        headings=(
            "method",
            "T at the end",
            "train time % of T = 1",
            "accuracy %",
            "paper: time %",
            "paper: accuracy %",
        ),
        rows=[_cells(arm, found, times[arm]) for arm in ARMS],
        verdict=_verdict(found, times),
        remarks=[
            "Mean ± standard deviation over seeds. Times are seconds of training steps, relative to the run of the "
            "same optimizer and seed with T = 1 kept. The paper does not say with which optimizer the parameters are "
            "trained beside the adjoint method."
        ],
        figures={figure.name: "Left: training time and accuracy against a fixed T. Right: T in the course of training"},
    )


def _config(part: Part, arm: Arm, seed: int, bench: Bench) -> RunConfig:
    column = next(column for column in continuous.COLUMNS if column.key == part.column)
    recipe = continuous.recipe_of(column, bench)
    learned: dict[str, Scalar] = {} if arm.method == "off" else {"learn_time": arm.method, **SETTINGS}
    base = recipe.run
    return replace(
        base,
        label=arm.name,
        data=replace(base.data, name=part.dataset),
        network=replace(base.network, options={**base.network.options, "time": arm.T, **learned}),
        optimizer=_optimizer(recipe, arm, bench),
        training=replace(base.training, seed=seed, log_every=1),
    )


def _optimizer(recipe: Recipe, arm: Arm, bench: Bench) -> OptimizerConfig:
    if bench.quick:
        return read_optimizer({"name": arm.optimizer, **QUICK[arm.optimizer]})
    if arm.optimizer == recipe.run.optimizer.name:
        return recipe.run.optimizer
    grid = recipe.grids[arm.optimizer]
    return grid.at({key: values[len(values) // 2] for key, values in grid.choices.items()})


def _path(run: RunFolder) -> list[float]:
    """T after each step."""
    return [next(iter(record["horizons"].values())) for record in run.metrics("step")]


def _seconds(run: RunFolder) -> float:
    final = run.final()
    assert final is not None
    return float(final["seconds"])


def _relative_time(found: Mapping[Arm, Sequence[RunFolder]], arm: Arm) -> list[float]:
    whole = found[arm.kept]
    return [100 * _seconds(run) / _seconds(other) for run, other in zip(found[arm], whole, strict=True)]


def _cells(arm: Arm, found: Mapping[Arm, Sequence[RunFolder]], times: Sequence[float]) -> list[str]:
    ends = [_path(run)[-1] for run in found[arm]] if arm.method != "off" else [arm.T] * len(found[arm])
    paper = IN_PAPER.get(arm, ("–", "–"))
    accuracy = spread([test_accuracy(run) for run in found[arm]])
    return [arm.name, spread(ends, 3), spread(times, 0), accuracy, *paper]


def _verdict(found: Mapping[Arm, Sequence[RunFolder]], times: Mapping[Arm, Sequence[float]]) -> str:
    texts = []
    for arm in (arm for arm in LEARNED if arm.T == 1.0):
        change = mean(map(test_accuracy, found[arm])) - mean(map(test_accuracy, found[arm.kept]))
        end = mean(_path(run)[-1] for run in found[arm])
        texts.append(f"{arm.title}: T = {end:.2f}, {mean(times[arm]):.0f} % of the time, {change:+.2f} % accuracy")
    return (
        f"Learned from T = 1, against T = 1 kept: {'; '.join(texts)}. In the paper: OCNOpt T = 0.5 and 81 % of the "
        "time, the adjoint method 96 %, with 1.2 % less accuracy than OCNOpt."
    )


def _describe(part: Part, bench: Bench, seeds: Sequence[int]) -> list[str]:
    config = _config(part, FIXED[0], seeds[0], bench)
    shown: list[Any] = [f"{key} {value}" for key, value in SETTINGS.items()]
    options = config.optimizer.options
    size = f"{config.training.epochs} epochs, batch {config.data.batch_size}"
    adam = _config(part, LEARNED[-1], seeds[0], bench).optimizer
    return [
        f"Scale: {bench.scale}. Solver {bench.solver}. Seeds {', '.join(map(str, seeds))}. {', '.join(shown)}.",
        f"{part.dataset}: {bench.samples(config.data)}; {size}; OCNOpt with Kronecker curvature, lr {options['lr']:g}, "
        f"curvature every {options['refresh_every']} steps; Adam with lr {adam.lr:g}.",
    ]

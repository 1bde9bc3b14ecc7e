"""Table IV and its figure: the final time T of a Neural ODE, fixed, or learned along with the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from ocnopt.lab.config import RunConfig
from ocnopt.lab.optimizers import read_optimizer
from ocnopt.lab.reproduce import continuous, ode_figures
from ocnopt.lab.reproduce.bench import Bench, Finding
from ocnopt.lab.reproduce.continuous import KRONECKER
from ocnopt.lab.reproduce.tuning import spread, test_accuracy
from ocnopt.lab.runs import RunFolder
from ocnopt.lab.schema import Scalar

#: relative training time and accuracy in percent, learned from T = 1
PAPER = {"first_order": ("96", "76.61"), "feedback": ("81", "77.82")}
TITLES = {"off": "fixed", "first_order": "adjoint method", "feedback": "OCNOpt"}


@dataclass(frozen=True)
class Arm:
    """A way to choose T, and where it begins."""

    method: str
    T: float

    @property
    def name(self) -> str:
        return f"{TITLES[self.method]}, T = {self.T:g}"


FIXED = tuple(Arm("off", T) for T in (1.0, 0.75, 0.5, 0.2))
LEARNED = tuple(Arm(method, T) for method in ("feedback", "first_order") for T in (1.0, 0.2))

#: of the price of time c and the step size of T; both methods have the same
SETTINGS: dict[str, Scalar] = {"time_penalty": 0.05, "time_lr": 0.05, "time_every": 1}


@dataclass(frozen=True)
class Part:
    network: str
    dataset: str


PARTS = (Part("conv_ode", "CIFAR10"), Part("conv_ode", "MNIST"))


def run(bench: Bench) -> Finding:
    """Train with T fixed at several values, and learned by both methods from two."""
    part = (bench.select(PARTS) if bench.only else PARTS)[0]
    seeds = bench.seeds(quick=2, full=3)
    within = replace(bench, folder=bench.folder / bench.solver)
    arms = (*FIXED, *LEARNED)
    runs = iter(within.train([_config(part, arm, seed, bench) for seed in seeds for arm in arms]))
    by_seed = [[next(runs) for _ in arms] for _ in seeds]
    found = {arm: [row[i] for row in by_seed] for i, arm in enumerate(arms)}
    figure = bench.folder / f"horizon-{bench.solver}.png"
    paths = {arm.name: [_path(run) for run in found[arm]] for arm in LEARNED}
    times = {arm: _relative_time(found, arm) for arm in arms}
    fixed = {arm.T: (mean(times[arm]), mean(map(test_accuracy, found[arm]))) for arm in FIXED}
    ode_figures.draw_horizons(figure, fixed, paths)
    return Finding(
        title="Table IV: the final time of a Neural ODE, learned",
        setting=_describe(part, bench, seeds),
        data=[
            {
                "method": TITLES[arm.method],
                "T": arm.T,
                "relative_time": times[arm],
                "accuracy": [test_accuracy(run) for run in found[arm]],
                "path": paths.get(arm.name),
            }
            for arm in arms
        ],
        headings=(
            "method",
            "T at the end",
            "train time % of T = 1",
            "accuracy %",
            "paper: time %",
            "paper: accuracy %",
        ),
        rows=[_cells(arm, found, times[arm]) for arm in arms],
        verdict=_verdict(found, times),
        remarks=[
            "Mean ± standard deviation over seeds. Times are seconds of training steps, each relative to the run with "
            "T = 1 and the same seed."
        ],
        figures={figure.name: "Left: training time and accuracy against a fixed T. Right: T in the course of training"},
    )


def _config(part: Part, arm: Arm, seed: int, bench: Bench) -> RunConfig:
    column = next(column for column in continuous.COLUMNS if column.dataset == part.dataset)
    recipe = continuous.recipe_of(column, bench)
    learned: dict[str, Scalar] = {} if arm.method == "off" else {"learn_time": arm.method, **SETTINGS}
    base, rate = recipe.run, {**KRONECKER, "lr": 0.03} if bench.quick else {}
    return replace(
        base,
        label=arm.name,
        network=replace(base.network, options={**base.network.options, "time": arm.T, **learned}),
        optimizer=read_optimizer({**base.optimizer.table(), **rate}),
        training=replace(base.training, seed=seed, log_every=1),
    )


def _path(run: RunFolder) -> list[float]:
    """T after each step."""
    return [next(iter(record["horizons"].values())) for record in run.metrics("step")]


def _seconds(run: RunFolder) -> float:
    final = run.final()
    assert final is not None
    return float(final["seconds"])


def _relative_time(found: Mapping[Arm, Sequence[RunFolder]], arm: Arm) -> list[float]:
    whole = found[FIXED[0]]
    return [100 * _seconds(run) / _seconds(other) for run, other in zip(found[arm], whole, strict=True)]


def _cells(arm: Arm, found: Mapping[Arm, Sequence[RunFolder]], times: Sequence[float]) -> list[str]:
    ends = [_path(run)[-1] for run in found[arm]] if arm.method != "off" else [arm.T] * len(found[arm])
    paper = PAPER.get(arm.method, ("–", "–")) if arm.T == 1.0 else ("–", "–")
    accuracy = spread([test_accuracy(run) for run in found[arm]])
    return [arm.name, spread(ends, 3), spread(times, 0), accuracy, *paper]


def _verdict(found: Mapping[Arm, Sequence[RunFolder]], times: Mapping[Arm, Sequence[float]]) -> str:
    texts = []
    for method in ("feedback", "first_order"):
        arm = Arm(method, 1.0)
        change = mean(map(test_accuracy, found[arm])) - mean(map(test_accuracy, found[FIXED[0]]))
        end = mean(_path(run)[-1] for run in found[arm])
        texts.append(f"{TITLES[method]}: T = {end:.2f}, {mean(times[arm]):.0f} % of the time, {change:+.2f} % accuracy")
    return (
        f"Learned from T = 1, against T = 1 kept: {'; '.join(texts)}. In the paper: OCNOpt T = 0.5 and 81 % of the "
        "time, the adjoint method 96 %, with 1.2 % less accuracy than OCNOpt."
    )


def _describe(part: Part, bench: Bench, seeds: Sequence[int]) -> list[str]:
    config = _config(part, LEARNED[0], seeds[0], bench)
    shown: list[Any] = [f"{key} {value}" for key, value in SETTINGS.items()]
    options = config.optimizer.options
    size = f"{config.training.epochs} epochs, batch {config.data.batch_size}"
    return [
        f"Scale: {bench.scale}. Solver {bench.solver}. Seeds {', '.join(map(str, seeds))}. {', '.join(shown)}.",
        f"{part.dataset}: {bench.samples(config.data)}; {size}; OCNOpt with Kronecker curvature, lr {options['lr']:g}, "
        f"curvature every {options['refresh_every']} steps.",
    ]

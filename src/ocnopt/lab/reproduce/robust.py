"""Learning rates that are too large for SGD: does the feedback keep training stable?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from ocnopt.lab.config import DataConfig, RunConfig, parse_run
from ocnopt.lab.reproduce import figures
from ocnopt.lab.reproduce.bench import Bench, Finding
from ocnopt.lab.reproduce.tuning import losses, spread, test_accuracy
from ocnopt.lab.reproduce.verdict import deviation, exceeds, guess_rate, has_learned
from ocnopt.lab.runs import RunFolder

# All take plain gradient steps, without momentum or preconditioning, at the same rate: only the feedback differs.
_PLAIN = {"curvature": "identity", "momentum": 0.0, "ema": False}
METHODS: dict[str, dict[str, Any]] = {
    "SGD": {"name": "sgdm", "momentum": 0.0},
    "OCNOpt": {"name": "ocnopt", **_PLAIN, "feedback": "nonlinear"},
    "OCNOpt, rank B, β = 0.3": {
        "name": "ocnopt",
        **_PLAIN,
        "feedback": "nonlinear",
        "rank": "full",
        "gauss_newton": 0.3,
    },
}


@dataclass(frozen=True, eq=False)
class Case:
    """One panel of the figure. Rates and networks are the paper's; ``quick`` tables change the rest."""

    network: str
    dataset: str
    lr: float
    epochs: int
    batch_size: int
    quick_data: dict[str, int]
    quick_network: dict[str, int]
    quick_epochs: int


_SUBSET, _NARROW = {"train_limit": 2000, "test_limit": 1000}, {"channels": 8, "hidden": 32}
CASES = (
    Case("fcn", "DIGITS", 0.6, 20, 32, {}, {}, 8),
    Case("inception", "MNIST", 1.0, 5, 128, _SUBSET, _NARROW, 3),
    Case("inception", "SVHN", 2.0, 10, 128, _SUBSET, _NARROW, 12),
)


def run(bench: Bench) -> Finding:
    """Train with every method and seed; compare the curves of the training loss."""
    cases = bench.select(CASES)
    seeds = bench.seeds(quick=3, full=5)
    places = [(case, method) for case in cases for method in METHODS]
    runs = iter(bench.train([_config(*place, seed, bench) for place in places for seed in seeds]))
    found = {place: [next(runs) for _ in seeds] for place in places}
    figure = bench.folder / "robust.png"
    curves = {(case.dataset, method): [losses(run) for run in runs] for (case, method), runs in found.items()}
    figures.draw_curves(figure, {case.dataset: f"{case.dataset}, lr = {case.lr:g}" for case in cases}, curves)
    return Finding(
        title="Training at large learning rates",
        setting=_describe(cases, bench, seeds),
        data=[
            {"dataset": case.dataset, "lr": case.lr, "method": method, "finals": [run.final() for run in runs]}
            for (case, method), runs in found.items()
        ],
        headings=("dataset, network, learning rate", "method", "train loss, last epoch", "test accuracy %", "diverged"),
        rows=[_cells(case, method, runs) for (case, method), runs in found.items()],
        verdict=" ".join(_verdict(case, found, guess_rate(bench.load(_data(case, bench)))) for case in cases),
        remarks=[
            "Mean ± standard deviation over seeds. The paper shows curves and no numbers: there SGD makes no stable "
            "progress at these rates and OCNOpt converges on all three datasets."
        ],
        figures={figure.name: "Training loss against steps, median and range over seeds; × is a run that diverged"},
    )


def _config(case: Case, method: str, seed: int, bench: Bench) -> RunConfig:
    limits, narrow = (case.quick_data, case.quick_network) if bench.quick else ({}, {})
    table = {
        "label": method,
        "data": {"name": case.dataset, "batch_size": case.batch_size, **limits},
        "network": {"name": case.network, **narrow},
        "optimizer": {**METHODS[method], "lr": case.lr},
        "training": {"epochs": case.quick_epochs if bench.quick else case.epochs, "seed": seed, "log_every": 1},
    }
    return parse_run(bench.resized(table))


def _data(case: Case, bench: Bench) -> DataConfig:
    return _config(case, "SGD", bench.seed, bench).data


def _verdict(case: Case, found: Mapping[tuple[Case, str], Sequence[RunFolder]], guess: float) -> str:
    """Rank 1, which is the paper's method, against SGD."""
    sgd, ours = ([*map(test_accuracy, found[case, method])] for method in ("SGD", "OCNOpt"))
    numbers = f"{spread(ours)} % against {spread(sgd)} %"
    fails, learns = not has_learned(sgd, guess), has_learned(ours, guess)
    gap = mean(ours) - mean(sgd)
    if not learns:
        text = "unlike in the paper, OCNOpt does not learn at this rate"
    elif fails:
        text = "as in the paper, OCNOpt learns and SGD does not"
    elif not exceeds(gap, deviation(sgd), deviation(ours)):
        text = "unlike in the paper, SGD learns too, and the two are within the deviation of each other"
    else:
        text = f"unlike in the paper, SGD learns too; OCNOpt is {'better' if gap > 0 else 'worse'}"
    return f"{case.dataset}: {text} ({numbers})."


def _cells(case: Case, method: str, runs: list[RunFolder]) -> list[str]:
    finals = [final for run in runs if (final := run.final()) is not None]
    finite = [final["train_loss"] for final in finals if final["train_loss"] is not None]
    loss = spread(finite, 3) if len(finite) == len(finals) else "not finite"
    accuracy = spread([*map(test_accuracy, runs)])
    diverged = sum(final["diverged"] for final in finals)
    place = f"{case.dataset}, {case.network}, {case.lr:g}"
    return [place, method, loss, accuracy, f"{diverged} of {len(finals)}"]


def _describe(cases: list[Case], bench: Bench, seeds: tuple[int, ...]) -> list[str]:
    sentences = [f"Scale: {bench.scale}. Seeds {', '.join(map(str, seeds))}. No momentum, no preconditioning."]
    for case in cases:
        config = _config(case, "SGD", seeds[0], bench)
        options = "".join(f", {key} = {value}" for key, value in config.network.options.items())
        epochs = config.training.epochs
        samples = bench.samples(config.data)
        sentences.append(
            f"{case.dataset}, {case.network}{options}: {samples}, {epochs} epochs, batch {case.batch_size}."
        )
    return sentences

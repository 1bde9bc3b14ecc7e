"""Table III: EKFAC, and OCNOpt with fixed, random and adaptive alignment of the skip connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import mean
from typing import Any

from ocnopt.lab.config import RunConfig, parse_run
from ocnopt.lab.reproduce import figures
from ocnopt.lab.reproduce.bench import Bench, Finding
from ocnopt.lab.reproduce.tuning import best_rates, losses, spread, test_accuracy
from ocnopt.lab.runs import RunFolder
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.training import load_data

# EKFAC is OCNOpt with the feedback off, as in the paper: everything else is the same.
METHODS: dict[str, dict[str, Any]] = {
    "EKFAC": {"feedback": "off"},
    "fixed": {"feedback": "nonlinear", "alignment": "first"},
    "random": {"feedback": "nonlinear", "alignment": "random"},
    "adaptive": {"feedback": "nonlinear", "alignment": "adaptive"},
}
RATES = (3e-3, 1e-2, 3e-2)


@dataclass(frozen=True, eq=False)
class Case:
    """A row of the table: a network with a skip connection that can move, and how many steps it is trained for."""

    network: str
    dataset: str
    iterations: int
    batch_size: int = 128
    options: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.dataset}, {self.network}"


_BLOCK = {"blocks": 1, "projection": True}
QUICK_CASES = (Case("residual", "DIGITS", 320, 32, {**_BLOCK, "channels": 8}),)
FULL_CASES = (
    Case("residual", "SVHN", 1600, options=_BLOCK, paper=dict(zip(METHODS, (87.49, 88.20, 88.12, 88.33), strict=True))),
    Case("resnet18", "CIFAR10", 6000, paper=dict(zip(METHODS, (84.67, 85.20, 85.27, 85.65), strict=True))),
)


def run(bench: Bench) -> Finding:
    """Tune EKFAC and the fixed alignment; the other alignments have the learning rate of the fixed one."""
    cases = [case for case in (QUICK_CASES if bench.quick else FULL_CASES) if bench.chosen(case.network, case.dataset)]
    if not cases:
        raise ConfigError("only must name some of the rows of this experiment")
    seeds = bench.seeds(quick=3, full=3)
    tried = {
        (case, method): [_config(case, method, lr, seeds[0], bench) for lr in RATES]
        for case in cases
        for method in ("EKFAC", "fixed")
    }
    tuned = best_rates(bench, tried)
    rates = {(case, m): tuned[case, "EKFAC" if m == "EKFAC" else "fixed"] for case in cases for m in METHODS}
    runs = iter(bench.train([_config(*place, lr, seed, bench) for place, lr in rates.items() for seed in seeds]))
    found = {place: [next(runs) for _ in seeds] for place in rates}
    figure = bench.folder / "bandit.png"
    curves = {(case.dataset, method): [losses(run) for run in theirs] for (case, method), theirs in found.items()}
    figures.draw_curves(figure, {case.dataset: case.title for case in cases}, curves)
    return Finding(
        title="Table III: alignment strategies",
        setting=_describe(cases, bench, seeds),
        data=[
            {"row": case.title, "method": method, "lr": rates[case, method], "test": [*map(test_accuracy, theirs)]}
            for (case, method), theirs in found.items()
        ],
        headings=("test accuracy %", "", "EKFAC", *(f"OCNOpt, {method}" for method in METHODS if method != "EKFAC")),
        rows=[cells for case in cases for cells in _cells(case, found)],
        remarks=[
            "Mean ± standard deviation over seeds; bold is the best of a line. The paper gives no number of trials.",
            *(_differences(case, found) for case in cases),
            *(_choices(case, found[case, "adaptive"]) for case in cases),
            *(f"{case.title}: " + ", ".join(f"{m} lr {rates[case, m]:g}" for m in METHODS) + "." for case in cases),
        ],
        figures={figure.name: "Training loss against steps, mean and range over seeds"},
    )


def _config(case: Case, method: str, lr: float, seed: int, bench: Bench) -> RunConfig:
    table: dict[str, Any] = {
        "label": method,
        "data": {"name": case.dataset, "batch_size": case.batch_size, "validation": 0.1},
        "network": {"name": case.network, **case.options},
        "optimizer": {"name": "ocnopt", "curvature": "kronecker", "factor_every": 10, **METHODS[method], "lr": lr},
        "training": {"seed": seed, "log_every": 1},
    }
    table["training"]["epochs"] = bench.epochs or _epochs(parse_run(bench.resized(table)), case, bench)
    return parse_run(bench.resized(table))


def _epochs(config: RunConfig, case: Case, bench: Bench) -> int:
    """As many as come closest to the iterations of the paper, whatever part of the data there is."""
    samples = len(load_data(config.data, bench.data_dir, bench.download).train)
    return max(1, round(case.iterations / ceil(samples / case.batch_size)))


Found = Mapping[tuple[Case, str], Sequence[RunFolder]]


def _cells(case: Case, found: Found) -> list[list[str]]:
    ours = {method: [*map(test_accuracy, found[case, method])] for method in METHODS}
    best = max(map(mean, ours.values()))
    cells = [spread(values) for values in ours.values()]
    lines = [[case.title, "ours", *(_bold(c, mean(v) == best) for c, v in zip(cells, ours.values(), strict=True))]]
    if case.paper:
        top = max(case.paper.values())
        lines.append(["", "paper", *(_bold(f"{value:.2f}", value == top) for value in case.paper.values())])
    return lines


def _bold(text: str, best: bool) -> str:
    return f"**{text}**" if best else text


def _differences(case: Case, found: Found) -> str:
    """Seed by seed: networks that start alike and see the same batches."""
    test = {method: [*map(test_accuracy, found[case, method])] for method in METHODS}
    pairs = [("fixed", "EKFAC"), ("random", "fixed"), ("adaptive", "fixed"), ("adaptive", "random")]
    gaps = {(a, b): [x - y for x, y in zip(test[a], test[b], strict=True)] for a, b in pairs}
    return f"{case.title}, points gained: " + "; ".join(
        f"{a} over {b} {spread(g, sign='+')}" for (a, b), g in gaps.items()
    )


def _choices(case: Case, runs: Sequence[RunFolder]) -> str:
    """What the bandits believe in the end."""
    last = [run.metrics("alignment")[-1] for run in runs]
    arms = [key for key in last[0] if key.startswith("late by ")]
    chances = ", ".join(f"{arm}: {spread([record[arm] for record in last])}" for arm in arms)
    rounds = last[0]["rounds"]
    return f"{case.title}, adaptive: after {rounds} rewards the chances of the alignments are {chances}."


def _describe(cases: Sequence[Case], bench: Bench, seeds: Sequence[int]) -> list[str]:
    sentences = [
        f"Scale: {bench.scale}. Seeds {', '.join(map(str, seeds))}. Kronecker curvature for all, looked at every ten "
        "steps; OCNOpt with nonlinear rollout, rank 1, β = 1. EKFAC is the same with the feedback off.",
        f"Learning rates {', '.join(f'{lr:g}' for lr in RATES)} are tried for EKFAC and for the fixed alignment with "
        "the first seed, and chosen by accuracy on a tenth of the training samples, held out; random and adaptive "
        "alignment have the rate of the fixed one.",
        "Adaptive: EXP3++, rewarded after every step with the accuracy on a batch of the samples held out.",
    ]
    for case in cases:
        config = _config(case, "fixed", RATES[0], seeds[0], bench)
        samples = len(load_data(config.data, bench.data_dir, bench.download).train)
        steps = config.training.epochs * ceil(samples / case.batch_size)
        options = "".join(f", {key} = {value}" for key, value in case.options.items())
        sentences.append(
            f"{case.title}: {samples} training samples, {steps} steps of batch {case.batch_size} "
            f"({case.iterations} in the paper){options}."
            if case.paper
            else f"{case.title}: {samples} training samples, {steps} steps of batch {case.batch_size}{options}."
        )
    return sentences

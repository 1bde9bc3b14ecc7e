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
from ocnopt.lab.reproduce.verdict import deviation, exceeds
from ocnopt.lab.runs import RunFolder

# EKFAC is OCNOpt with the feedback off, as in the paper: everything else is the same.
METHODS: dict[str, dict[str, Any]] = {
    "EKFAC": {"feedback": "off"},
    "fixed": {"feedback": "nonlinear", "alignment": "first"},
    "random": {"feedback": "nonlinear", "alignment": "random"},
    "adaptive": {"feedback": "nonlinear", "alignment": "adaptive"},
}


@dataclass(frozen=True, eq=False)
class Case:
    """A row of the table: a network with a skip connection that can move, and how many steps it is trained for.

    Attributes:
        looks: steps between two looks of the curvature at the layers, and between two eigendecompositions. Those of a
            ResNet18 take seconds.
    """

    network: str
    dataset: str
    iterations: int
    rates: tuple[float, ...]
    batch_size: int = 128
    looks: tuple[int, int] = (10, 100)
    options: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.dataset}, {self.network}"


_BLOCK = {"blocks": 1, "projection": True}
QUICK_CASES = (Case("residual", "DIGITS", 320, (3e-3, 1e-2, 3e-2), 32, options={**_BLOCK, "channels": 8}),)
FULL_CASES = (
    Case(
        "residual", "SVHN", 1600, (3e-4, 1e-3, 3e-3, 1e-2), options=_BLOCK,
        paper=dict(zip(METHODS, (87.49, 88.20, 88.12, 88.33), strict=True)),
    ),
    Case(
        "resnet18", "CIFAR10", 6000, (3e-4, 1e-3, 3e-3, 1e-2), looks=(25, 250),
        paper=dict(zip(METHODS, (84.67, 85.20, 85.27, 85.65), strict=True)),
    ),
)  # fmt: skip


def run(bench: Bench) -> Finding:
    """Tune EKFAC and the fixed alignment; the other alignments have the learning rate of the fixed one."""
    cases = bench.select(QUICK_CASES if bench.quick else FULL_CASES)
    seeds = bench.seeds(quick=3, full=3)
    tried = {
        (case, method): [_config(case, method, lr, seeds[0], bench) for lr in case.rates]
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
        verdict=" ".join(_verdict(case, found) for case in cases),
        remarks=[
            "Mean ± standard deviation over seeds, also of the differences; bold is the best of a line. The paper "
            "gives no number of trials.",
            *(_choices(case, found[case, "adaptive"]) for case in cases),
            *(f"{case.title}: " + ", ".join(f"{m} lr {rates[case, m]:g}" for m in METHODS) + "." for case in cases),
        ],
        figures={figure.name: "Training loss against steps, median and range over seeds; × is a run that diverged"},
    )


def _config(case: Case, method: str, lr: float, seed: int, bench: Bench) -> RunConfig:
    table: dict[str, Any] = {
        "label": method,
        "data": {"name": case.dataset, "batch_size": case.batch_size, "validation": 0.1},
        "network": {"name": case.network, **case.options},
        "optimizer": {"name": "ocnopt", "curvature": "kronecker", **_looks(case), **METHODS[method], "lr": lr},
        "training": {"seed": seed, "log_every": 1},
    }
    table["training"]["epochs"] = bench.epochs or _epochs(parse_run(bench.resized(table)), case, bench)
    return parse_run(bench.resized(table))


def _looks(case: Case) -> dict[str, int]:
    return dict(zip(("factor_every", "refresh_every"), case.looks, strict=True))


def _epochs(config: RunConfig, case: Case, bench: Bench) -> int:
    """As many as come closest to the iterations of the paper, whatever part of the data there is."""
    samples = len(bench.load(config.data).train)
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


def _gap(case: Case, found: Found, a: str, b: str) -> list[float]:
    """Seed by seed: networks that start alike and see the same batches."""
    ours, theirs = ([*map(test_accuracy, found[case, method])] for method in (a, b))
    return [x - y for x, y in zip(ours, theirs, strict=True)]


def _verdict(case: Case, found: Found) -> str:
    """The paper's two claims: OCNOpt beats EKFAC, and adaptive alignment beats the others."""
    claims = []
    for a, b in (("fixed", "EKFAC"), ("adaptive", "fixed"), ("adaptive", "random")):
        gap = _gap(case, found, a, b)
        word = (
            ("better than" if mean(gap) > 0 else "worse than") if exceeds(mean(gap), deviation(gap)) else "level with"
        )
        claims.append(
            f"{a} alignment is {word} {b if b == 'EKFAC' else f'{b} alignment'} ({spread(gap, sign='+')} points)"
        )
    return f"{case.title}: {'; '.join(claims)}. In the paper the first of each pair is better."


def _choices(case: Case, runs: Sequence[RunFolder]) -> str:
    """What the bandits believe in the end."""
    last = [run.metrics("alignment")[-1] for run in runs]
    arms = [key for key in last[0] if key.startswith("late by ")]
    chances = ", ".join(f"{arm}: {spread([record[arm] for record in last])}" for arm in arms)
    rounds = last[0]["rounds"]
    return f"{case.title}, adaptive: after {rounds} rewards the chances of the alignments are {chances}."


def _describe(cases: Sequence[Case], bench: Bench, seeds: Sequence[int]) -> list[str]:
    return [
        f"Scale: {bench.scale}. Seeds {', '.join(map(str, seeds))}. Kronecker curvature for all; OCNOpt with nonlinear "
        "rollout, rank 1, β = 1. EKFAC is the same with the feedback off.",
        "The learning rates of EKFAC and of the fixed alignment are chosen with the first seed, by accuracy on a tenth "
        "of the training samples, held out; random and adaptive alignment have the rate of the fixed one.",
        "Adaptive: EXP3++, rewarded after every step with the accuracy on a batch of the samples held out.",
        *(_describe_case(case, bench, seeds[0]) for case in cases),
    ]


def _describe_case(case: Case, bench: Bench, seed: int) -> str:
    config = _config(case, "fixed", case.rates[0], seed, bench)
    steps = config.training.epochs * ceil(len(bench.load(config.data).train) / case.batch_size)
    there = f" ({case.iterations} in the paper)" if case.paper else ""
    options = "".join(f", {key} = {value}" for key, value in {**case.options, **_looks(case)}.items())
    rates = ", ".join(f"{lr:g}" for lr in case.rates)
    return (
        f"{case.title}: {bench.samples(config.data)}; {steps} steps{there} of batch {case.batch_size}{options}; "
        f"learning rates {rates}."
    )

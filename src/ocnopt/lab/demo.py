"""The runs of ``ocnopt demo``: two small datasets, every optimizer, at a good learning rate and at ten times that.

A fifth of the training samples is held out: by it one of the two rates is chosen, and shown is the accuracy on the test
samples. No line of the table has more than these two settings to choose from; OCNOpt has three lines, one for each
curvature.

Good rates were found on other seeds (100 and 101), by the accuracy on a fifth of the training samples summed over both
datasets, among 1·10ⁿ and 3·10ⁿ around the best; the networks and batch sizes are those of the paper's Table I. E-MSA
and DDP solve an optimization problem in every step: they get fewer epochs and one setting, their own default rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ocnopt.lab.config import RunConfig, parse_run

#: batch size, epochs, and the epochs of those that take seconds for each
DATASETS: Mapping[str, tuple[int, int, int]] = {"WINE": (8, 10, 3), "DIGITS": (16, 5, 1)}

#: of the training samples, to choose the learning rate by
VALIDATION = 0.2
TOO_LARGE = 10.0


@dataclass(frozen=True)
class Contender:
    """An optimizer of the demo."""

    label: str
    name: str
    lr: float
    options: Mapping[str, Any] = field(default_factory=dict)
    slow: bool = False


CONTENDERS = (
    Contender("OCNOpt", "ocnopt", 0.01),
    Contender("OCNOpt kronecker", "ocnopt", 0.003, {"curvature": "kronecker"}),
    Contender(
        "OCNOpt identity",
        "ocnopt",
        0.3,
        {"curvature": "identity", "rank": "full", "gauss_newton": 0.3, "momentum": 0.0},
    ),
    Contender("SGDm", "sgdm", 0.03),
    Contender("RMSprop", "rmsprop", 0.003),
    Contender("Adam", "adam", 0.01),
    Contender("AdamW", "adamw", 0.01),
    Contender("Muon", "muon", 0.03),
    Contender("EKFAC", "ekfac", 0.01),
    Contender("E-MSA", "emsa", 1.0, slow=True),
    Contender("DDP", "ddp", 0.1, slow=True),
)


def configs(datasets: Iterable[str], seeds: Iterable[int], epochs: int | None = None) -> list[RunConfig]:
    """All runs, in the order of the table. ``epochs`` shortens them."""
    seeds = list(seeds)
    return [
        _config(dataset, contender, lr, seed, epochs)
        for dataset in datasets
        for contender in CONTENDERS
        for lr in ((contender.lr,) if contender.slow else (contender.lr, TOO_LARGE * contender.lr))
        for seed in seeds
    ]


def expected_work(config: RunConfig) -> float:
    """A rough guess at how long a run takes beside the others, to begin with the longest."""
    per_step = {"ddp": 200.0, "emsa": 60.0, "ocnopt": 3.0}.get(config.optimizer.name, 1.0)
    return per_step * config.training.epochs * (10 if config.data.name == "DIGITS" else 1)


def _config(dataset: str, contender: Contender, lr: float, seed: int, epochs: int | None) -> RunConfig:
    batch_size, usual, few = DATASETS[dataset]
    planned = few if contender.slow else usual
    return parse_run(
        {
            "label": contender.label,
            "data": {"name": dataset, "batch_size": batch_size, "validation": VALIDATION},
            "network": {"name": "fcn"},
            "optimizer": {"name": contender.name, "lr": lr, **contender.options},
            "training": {"epochs": planned if epochs is None else min(epochs, planned), "seed": seed},
        }
    )

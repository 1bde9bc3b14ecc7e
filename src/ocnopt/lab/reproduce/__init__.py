"""Repeat the experiments of the paper. Each is a function that takes a :class:`Bench` and writes one folder."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ocnopt.lab.reproduce.bench import Bench, Finding

__all__ = ["EXPERIMENTS", "Bench", "Finding", "reproduce"]

#: what can be reproduced, and what it shows
EXPERIMENTS = {
    "table1": "Table I: test accuracy of all optimizers",
    "robust": "training with learning rates that are too large for SGD",
    "ablation": "what the feedback changes for each baseline",
    "complexity": "run time and memory against batch size",
    "feedback": "what the feedback policies look at, as images",
    "bandit": "Table III: alignment of skip connections, fixed, random and adaptive",
    "multiplayer": "fictitious players: training and accuracy against their number",
    "table2": "Tables II and V: Neural ODEs for images, time series and densities",
    "sensitivity": "Neural ODEs: what comes out against the learning rate",
    "horizon": "Table IV: the final time of a Neural ODE, learned",
    "convergence": "Neural ODEs: convergence against wall-clock time",
}


def reproduce(name: str, bench: Bench) -> Finding:
    """Run one experiment and write its folder: a JSON file, a Markdown page and figures."""
    if name not in EXPERIMENTS:
        raise ValueError(f"name must be one of {', '.join(EXPERIMENTS)}, got {name!r}")
    experiment: Callable[[Bench], Finding] = import_module(f"ocnopt.lab.reproduce.{name}").run
    finding = experiment(bench)
    finding.write(bench, name)
    return finding

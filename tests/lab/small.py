"""Runs that take a tenth of a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ocnopt.lab.config import RunConfig, parse_run
from ocnopt.lab.runs import Record, RunFolder

#: every optimizer, and OCNOpt in every way that keeps a state of its own
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgdm": {"name": "sgdm"},
    "rmsprop": {"name": "rmsprop"},
    "adam": {"name": "adam"},
    "adamw": {"name": "adamw"},
    "muon": {"name": "muon"},
    "ekfac": {"name": "ekfac", "momentum": 0.5, "refresh_every": 4},
    "emsa": {"name": "emsa", "max_iter": 2},
    "ddp": {"name": "ddp"},
    "ocnopt": {"name": "ocnopt"},
    "ocnopt-kronecker": {"name": "ocnopt", "curvature": "kronecker", "feedback": "nonlinear", "refresh_every": 4},
    "ocnopt-rank": {"name": "ocnopt", "curvature": "identity", "rank": "full"},
    "ocnopt-paper": {"name": "ocnopt", "bellman": "paper", "feedback": "nonlinear"},
}


def small_table(optimizer: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
    """WINE has 142 training samples: five batches of 26 and one of 12 an epoch."""
    return {
        "data": {"name": "WINE", "batch_size": 26},
        "network": {"name": "fcn", "width": 6, "depth": 3},
        "optimizer": optimizer or {"name": "sgdm"},
        "training": {"epochs": 2, "log_every": 1, **training},
    }


def small_run(optimizer: dict[str, Any] | None = None, **training: Any) -> RunConfig:
    return parse_run(small_table(optimizer, **training))


def create(path: Path, config: RunConfig) -> RunFolder:
    return RunFolder.create(path, config.table())


def without_seconds(records: list[Record]) -> list[Record]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]

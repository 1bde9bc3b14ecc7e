"""A sweep that takes seconds."""

from pathlib import Path
from typing import Any

from ocnopt.lab.recipes import Recipe, parse_recipe
from ocnopt.lab.sweep import SweepOptions
from ocnopt.lab.sweep.storage import Pulse
from ocnopt.lab.toml import dumps

#: for tests in which somebody dies: as short as a busy machine allows
PULSE = Pulse(interval=1, grace=6)
#: for tests in which nobody dies, however slow the machine
PATIENT = Pulse(interval=1, grace=600)

TABLE: dict[str, Any] = {
    "title": "WINE, small",
    "data": {"name": "WINE", "batch_size": 32, "validation": 0.2},
    "network": {"name": "fcn", "depth": 2},
    "optimizer": {"name": "sgdm"},
    "training": {"epochs": 2, "checkpoint_every": 1, "log_every": 1},
    "grids": {
        "sgdm": {"lr": [0.01, 0.1, 0.3], "weight_decay": [0.0, 1e-3]},
        "plain": {"name": "ocnopt", "lr": [0.01, 0.1], "feedback": ["linear", "off"]},
    },
    "paper": {"sgdm": 94.35},
}


def small_recipe(**changes: Any) -> Recipe:
    return parse_recipe({**TABLE, **changes})


def small_sweep(folder: Path, storage: str, study: str, **options: Any) -> SweepOptions:
    recipe = folder / "recipe.toml"
    recipe.write_text(dumps(TABLE))
    return SweepOptions(str(recipe), storage, study, folder / "runs", pulse=PULSE, **options)

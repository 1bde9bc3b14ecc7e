"""Recipes: a run, and the grids of optimizers that are to be tried in its place.

A recipe is the configuration of a run with three things more:

.. code-block:: toml

    title = "Table I, fully-connected, WINE"

    [grids.sgdm]            # one table a line of the results; the key is the optimizer unless `name` says otherwise
    lr = [0.01, 0.1]        # a list is tried value by value, anything else is fixed
    weight_decay = 0.0

    [paper]                 # what the paper reports, by grid: test accuracy in percent; of a density, its loss
    sgdm = 94.35
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from ocnopt.lab.config import RUN_KEYS, RunConfig, load_toml, naming, parse_run
from ocnopt.lab.data import find_entry
from ocnopt.lab.optimizers import OptimizerConfig, find_kind, read_optimizer
from ocnopt.lab.schema import ConfigError, Percentage, Scalar, convert, describe, refuse_unknown, sub_table

# beside the package when it is installed, at the top of the repository when it is used from there
_FOLDERS = (Path(__file__).parent / "recipe_files", Path(__file__).parents[3] / "recipes")


@dataclass(frozen=True)
class Grid:
    """The settings of one optimizer that are to be tried: every combination of ``choices``."""

    key: str
    optimizer: str
    choices: Mapping[str, tuple[Scalar, ...]]

    def __len__(self) -> int:
        return prod(map(len, self.choices.values()))

    @property
    def label(self) -> str:
        """How tables call it: the optimizer, and what is fixed and not at its default."""
        kind = find_kind(self.optimizer, f"grids.{self.key}")
        fixed = {k: v[0] for k, v in self.choices.items() if len(v) == 1 and v[0] != kind.options[k].default}
        return " ".join((kind.title, *(f"{k}={v}" for k, v in fixed.items() if k != "lr")))

    def at(self, values: Mapping[str, Scalar]) -> OptimizerConfig:
        """The optimizer with these values; they need not be in the grid."""
        return read_optimizer({"name": self.optimizer, **values}, f"grids.{self.key}")

    def alone(self) -> OptimizerConfig:
        """One setting for the whole grid: what it fixes, and of what it varies the optimizer's own default."""
        options = find_kind(self.optimizer, f"grids.{self.key}").options
        return self.at({k: v[0] for k, v in self.choices.items() if len(v) == 1 or options[k].default is MISSING})

    def points(self) -> Iterator[OptimizerConfig]:
        """All combinations, the last option changing fastest."""
        for values in product(*self.choices.values()):
            yield self.at(dict(zip(self.choices, values, strict=True)))


@dataclass(frozen=True)
class Recipe:
    """A run, the grids to search, and what the paper found (test accuracy in percent, or loss, by grid)."""

    title: str
    run: RunConfig
    grids: Mapping[str, Grid]
    paper: Mapping[str, float]


def parse_recipe(table: Mapping[str, Any]) -> Recipe:
    refuse_unknown(("title", *RUN_KEYS, "grids", "paper"), table, "")
    run = parse_run({key: table[key] for key in RUN_KEYS if key in table})
    grids = {
        key: _read_grid(key, sub_table(sub_table(table, "grids"), key, "grids.")) for key in table.get("grids", {})
    }
    title = convert(str, table.get("title", ""), "title") or f"{run.data.name}, {run.network.name}"
    return Recipe(title, run, grids, _read_paper(sub_table(table, "paper"), grids, run))


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read a recipe or the configuration of a run, from a file or, by its name, from the recipes that come along."""
    found = find_recipe(path)
    with naming(found):
        return parse_recipe(load_toml(found))


def find_recipe(path: str | os.PathLike[str]) -> Path:
    """The file itself, or the recipe of this name; a path that does not exist is handed back as it is."""
    given = Path(path)
    if given.is_file() or given.parent != Path():
        return given
    return next((r for r in list_recipes() if path in (r.name, r.stem)), given)


def list_recipes() -> list[Path]:
    """The recipes that come along: one per row of Tables I and II of the paper, and transformers."""
    return next((sorted(folder.glob("*.toml")) for folder in _FOLDERS if folder.is_dir()), [])


def _read_grid(key: str, table: Mapping[str, Any]) -> Grid:
    where = f"grids.{key}"
    values = dict(table)
    name = values.pop("name", key)
    kind = find_kind(name, where)
    refuse_unknown(kind.options, values, where)
    choices: dict[str, tuple[Scalar, ...]] = {}
    for option, given in values.items():
        entries = given if isinstance(given, list) else [given]
        if not entries:
            raise ConfigError(f"{where}.{option} must not be empty: it must be {describe(kind.options[option].hint)}")
        choices[option] = tuple(convert(kind.options[option].hint, v, f"{where}.{option}") for v in entries)
    grid = Grid(key, name, choices)
    for _ in grid.points():  # each is checked as it is made
        pass
    return grid


def _read_paper(table: Mapping[str, Any], grids: Mapping[str, Grid], run: RunConfig) -> dict[str, float]:
    refuse_unknown(grids, table, "paper")
    hint = float if find_entry(run.data.name).task == "density" else Percentage
    return {key: convert(hint, value, f"paper.{key}") for key, value in table.items()}

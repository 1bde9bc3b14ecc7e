"""The points of a sweep: every setting of every grid, for every seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from ocnopt.lab.comparison import hold_out
from ocnopt.lab.config import DataConfig, RunConfig, TrainingConfig
from ocnopt.lab.recipes import Grid, Recipe
from ocnopt.lab.schema import ConfigError, Scalar


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    grid: Grid
    config: RunConfig

    @cached_property
    def key(self) -> str:
        """What makes it the same point after a restart, on another machine, or after the recipe was edited.

        What the data and the training leave at its default is not part of it, so they may gain options. Every option
        of the optimizer is, since its defaults may change: one that gains an option makes new points.
        """
        return f"{self.grid.key}-{_digest(self.config)}"

    @cached_property
    def setting(self) -> str:
        """The same for all seeds."""
        return f"{self.grid.key}-{_digest(self.config.with_seed(0))}"

    @property
    def values(self) -> dict[str, Scalar]:
        """What distinguishes it from the other points of its grid: the options that the grid sets, and the seed."""
        options = {name: self.config.optimizer.options[name] for name in self.grid.choices}
        return {**options, "seed": self.config.training.seed}


def points_of(recipe: Recipe, *, grids: Sequence[str] = (), seeds: Iterable[int] | None = None) -> list[Point]:
    """All points, every setting with the first seed before any with the second.

    Settings are compared on samples held out of the training set, never on the test set: where the recipe holds out
    none, a tenth of them is.

    Args:
        recipe: a run and its grids.
        grids: the keys of those to search; all of them when empty.
        seeds: each setting is run with each of them; the recipe's own seed when ``None``.
    """
    for key in grids:
        if key not in recipe.grids:
            raise ConfigError(f"grids.{key} is not in the recipe: it has {', '.join(recipe.grids) or 'no grids'}")
    chosen = [grid for key, grid in recipe.grids.items() if not grids or key in grids]
    if not chosen:
        raise ConfigError("grids must hold at least one table: there is nothing to sweep over")
    run = hold_out(recipe.run)
    return [
        Point(grid, run.with_optimizer(optimizer, grid.label).with_seed(seed))
        for seed in (list(seeds) if seeds is not None else [run.training.seed])
        for grid in chosen
        for optimizer in grid.points()
    ]


def _digest(config: RunConfig) -> str:
    table = {**config.table(), "data": _chosen(config.data), "training": _chosen(config.training)}
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:12]


def _chosen(part: DataConfig | TrainingConfig) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    return {f.name: value for f in fields(part) if (value := getattr(part, f.name)) != f.default}

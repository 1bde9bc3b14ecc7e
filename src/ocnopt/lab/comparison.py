"""Several optimizers, seeds and learning rates side by side: which runs that makes, and where they go."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ocnopt.lab import toml
from ocnopt.lab.config import RunConfig
from ocnopt.lab.optimizers import OptimizerConfig, read_optimizer
from ocnopt.lab.recipes import Recipe
from ocnopt.lab.runs import RunFolder
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.training import Folder, rehearse

#: those that take any network and a few seconds on a small one
DEFAULT_OPTIMIZERS = ("ocnopt", "sgdm", "rmsprop", "adam", "adamw", "muon", "ekfac")

#: the part of the training samples by which settings are chosen, where nothing else is said
VALIDATION = 0.1


def contenders(base: RunConfig, recipe: Recipe | None = None, rates: Sequence[float] = ()) -> list[OptimizerConfig]:
    """The optimizer of the run itself, and beside it those of the recipe's grids; where it has none, the usual ones.

    Each once: where learning rates are given, two that differ in nothing but their own are the same.
    """
    grids = [] if recipe is None else [grid.alone() for grid in recipe.grids.values()]
    found: list[OptimizerConfig] = []
    for each in (base.optimizer, *(grids or [read_optimizer({"name": name}) for name in DEFAULT_OPTIMIZERS])):
        if not any(_same(each, other, but_for_rates=bool(rates)) for other in found):
            found.append(each)
    return found


def _same(one: OptimizerConfig, other: OptimizerConfig, *, but_for_rates: bool) -> bool:
    if one.name != other.name:
        return False
    return (one.with_lr(other.lr) if but_for_rates else one) == other


def hold_out(run: RunConfig) -> RunConfig:
    """With samples to choose settings by: never the test set. Where the run holds out none, a tenth is."""
    return run if run.data.validation else replace(run, data=replace(run.data, validation=VALIDATION))


def vary(base: RunConfig, optimizers: Iterable[OptimizerConfig], rates: Sequence[float], seeds: int) -> list[RunConfig]:
    """Every optimizer at every learning rate (its own, if there are none) with ``seeds`` seeds from the base's on.

    Where there are several rates to choose from, samples are held out to choose by.
    """
    first = base.training.seed
    base = hold_out(base) if len(rates) > 1 else base
    return [
        base.with_optimizer(optimizer.with_lr(lr), base.label if optimizer == base.optimizer else None).with_seed(seed)
        for optimizer in optimizers
        for lr in rates or (optimizer.lr,)
        for seed in range(first, first + seeds)
    ]


def rehearse_all(configs: Iterable[RunConfig], data_dir: Folder | None = None, download: bool = False) -> None:
    """Raise what one of the runs would raise before its first step. What is to be downloaded comes here, and once."""
    for config in {_kind(config): config for config in configs}.values():
        rehearse(config, data_dir=data_dir, download=download)


def _kind(config: RunConfig) -> str:
    """The same for runs that differ in nothing but their seeds and learning rates."""
    return toml.dumps(config.with_seed(0).with_optimizer(config.optimizer.with_lr(1.0), config.label).table())


def create_runs(out: Path, configs: Sequence[RunConfig]) -> list[RunFolder]:
    """A folder for each run, with its configuration: what is begun can be continued from the folders alone."""
    names = [run_name(config) for config in configs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two of the runs are the same: {twice}")
    return [RunFolder.create(out / name, config.table()) for name, config in zip(names, configs, strict=True)]


def run_name(config: RunConfig) -> str:
    parts = (config.data.name, config.network.name, config.label, f"lr{config.optimizer.lr:g}")
    return "-".join((*map(slug, parts), f"seed{config.training.seed}"))


def slug(text: str) -> str:
    """Letters, digits, dots, hyphens: safe in a file name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")

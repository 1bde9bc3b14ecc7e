"""A configuration from what somebody types: a file, options that change it, or options alone."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ocnopt.lab.config import RUN_KEYS, RunConfig, load_toml, naming, parse_run
from ocnopt.lab.optimizers import OptimizerConfig, read_optimizer
from ocnopt.lab.recipes import find_recipe, parse_recipe
from ocnopt.lab.schema import ConfigError


@dataclass(frozen=True)
class Settings:
    """What a command line says about a run; ``None`` leaves what the file says, or the default."""

    config: str | None = None
    dataset: str | None = None
    network: str | None = None
    optimizer: str | None = None
    lr: float | None = None
    epochs: int | None = None
    batch_size: int | None = None
    seed: int | None = None
    overrides: Iterable[str] = field(default=())

    def run(self) -> RunConfig:
        """The configuration, checked."""
        table = self._table_of_file()
        for section, key, value in (
            ("data", "name", self.dataset),
            ("data", "batch_size", self.batch_size),
            ("training", "epochs", self.epochs),
            ("training", "seed", self.seed),
        ):
            if value is not None:
                _put(table, (section, key), value)
        if self.network is not None and self.network != table.get("network", {}).get("name"):
            table["network"] = {"name": self.network}  # the options of another network mean nothing here
        if self.optimizer is not None:
            table.pop("label", None)
            table["optimizer"] = _merged(table.get("optimizer", {}), parse_spec(self.optimizer))
        if self.lr is not None:
            _put(table, ("optimizer", "lr"), self.lr)
        for path, value in map(parse_assignment, self.overrides):
            _put(table, path, value)
        return parse_run(table)

    def _table_of_file(self) -> dict[str, Any]:
        if self.config is None:
            if self.dataset is None:
                raise ConfigError("name a configuration file, a recipe, or a dataset with --dataset")
            return {"network": {"name": "fcn"}, "optimizer": {"name": "ocnopt"}}
        path = find_recipe(self.config)
        with naming(path):
            table = load_toml(path)
            parse_recipe(table)  # what is wrong in the file is said with the name of the file
        return {key: table[key] for key in RUN_KEYS if key in table}


def parse_spec(spec: str) -> dict[str, Any]:
    """``ocnopt:curvature=kronecker,rank=4`` as the table of an optimizer."""
    name, _, options = spec.partition(":")
    table: dict[str, Any] = {"name": name}
    for option in filter(None, options.split(",")):
        (key,), value = parse_assignment(option)
        table[key] = value
    return table


def parse_optimizer(spec: str) -> OptimizerConfig:
    return read_optimizer(parse_spec(spec), "--optimizer")


def parse_assignment(text: str) -> tuple[tuple[str, ...], Any]:
    """``data.batch_size=64`` as its keys and its value: a value of TOML, or else a text."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"write key=value, not {text!r}")
    return tuple(key.strip().split(".")), _parse_value(value.strip())


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(table: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, key = path
    for parent in parents:
        table[parent] = dict(table.get(parent, {}))
        table = table[parent]
    table[key] = value


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The same optimizer keeps what the file says about it; another one starts from its own defaults."""
    return {**old, **new} if old.get("name") == new["name"] else dict(new)

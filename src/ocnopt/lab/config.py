"""The configuration of one run: small, typed, in TOML.

.. code-block:: toml

    label = "OCNOpt"        # the line of a table; left out, it is made of the optimizer and its options

    [data]
    name = "DIGITS"
    batch_size = 32

    [network]
    name = "fcn"            # and the options of the network: width, depth, activation

    [optimizer]
    name = "ocnopt"         # and the options of the optimizer
    lr = 0.01

    [training]
    epochs = 20
    seed = 0
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ocnopt.lab.data import find_entry
from ocnopt.lab.models import DENSITIES, NETWORKS, READ_SERIES, READ_TEXT
from ocnopt.lab.optimizers import OptimizerConfig, read_optimizer
from ocnopt.lab.schema import (
    ConfigError,
    Count,
    Fraction,
    Natural,
    Scalar,
    convert,
    options_of,
    read_options,
    read_table,
    refuse_unknown,
    sub_table,
)

RUN_KEYS = ("label", "data", "network", "optimizer", "training")


@dataclass(frozen=True)
class DataConfig:
    """What is learned, in which portions.

    Attributes:
        batch_size: samples per step, over all processes together.
        train_limit, test_limit: only so many samples, drawn class by class in the proportions of the whole.
        validation: the fraction of the training samples that is held out and evaluated beside the test samples.
        split_seed: of the split into train and test where the dataset has none of its own; not the seed of the run,
            so that all runs are tested on the same samples.
        drop_last: leave out the last batch of an epoch when it is not full.
        block_length: characters in a sample of text; :data:`ocnopt.lab.data.BLOCK_LENGTH` where nothing is said.
        missing: of time series: the fraction of the observations of each that is lost. They get a channel that says
            which are left, see :func:`ocnopt.lab.data.irregular`. What is lost depends on ``split_seed``.
        stride: of such series, look at every so many-th time only.
    """

    name: str
    batch_size: Count = 32
    train_limit: Count | None = None
    test_limit: Count | None = None
    validation: Fraction = 0.0
    split_seed: Natural = 0
    drop_last: bool = False
    block_length: Count | None = None
    missing: Fraction | None = None
    stride: Count = 1


@dataclass(frozen=True)
class TrainingConfig:
    """How long, from which seed, and what is written down.

    Attributes:
        seed: of the initial weights and the order of the samples.
        schedule: of the learning rate: constant, or along a half cosine from the learning rate to 0.
        log_every: steps between two ``step`` records.
        checkpoint_every: steps between two checkpoints; 0 is one at the end of every epoch and no others.
        reward_every: steps between two rewards of OCNOpt's ``alignment = "adaptive"``: accuracies on held-out samples.
    """

    epochs: Count = 20
    seed: Natural = 0
    schedule: Literal["constant", "cosine"] = "constant"
    log_every: Count = 10
    checkpoint_every: Natural = 0
    reward_every: Count = 1


@dataclass(frozen=True)
class NetworkConfig:
    """A network by name, with the options that differ from its own (or its dataset's) defaults."""

    name: str
    options: Mapping[str, Scalar]

    def table(self) -> dict[str, Scalar]:
        return {"name": self.name, **self.options}


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the numbers of a run, except the machine."""

    label: str
    data: DataConfig
    network: NetworkConfig
    optimizer: OptimizerConfig
    training: TrainingConfig

    def table(self) -> dict[str, Any]:
        """As a TOML table, every option of the optimizer included: its defaults may change one day."""
        return {
            "label": self.label,
            "data": asdict(self.data),
            "network": self.network.table(),
            "optimizer": self.optimizer.table(),
            "training": asdict(self.training),
        }

    def with_optimizer(self, optimizer: OptimizerConfig, label: str | None = None) -> RunConfig:
        return replace(self, optimizer=optimizer, label=label or optimizer.label())

    def with_seed(self, seed: int) -> RunConfig:
        return replace(self, training=replace(self.training, seed=seed))


def parse_run(table: Mapping[str, Any]) -> RunConfig:
    """Check a table and give it types."""
    refuse_unknown(RUN_KEYS, table, "")
    optimizer = read_optimizer(sub_table(table, "optimizer"))
    label = convert(str, table.get("label", ""), "label")
    data, network = _read_data(sub_table(table, "data")), _read_network(sub_table(table, "network"))
    _check_match(data, network)
    return RunConfig(
        label=label or optimizer.label(),
        data=data,
        network=network,
        optimizer=optimizer,
        training=read_table(TrainingConfig, sub_table(table, "training"), "training"),
    )


def read_run(path: str | os.PathLike[str]) -> RunConfig:
    """Read the ``config.toml`` of a run."""
    with naming(path):
        return parse_run(load_toml(path))


def _read_data(table: Mapping[str, Any]) -> DataConfig:
    data = read_table(DataConfig, table, "data")
    try:
        entry = find_entry(data.name)
    except ValueError as error:
        raise ConfigError(f"data.name: {error}") from None
    if data.block_length is not None and entry.task != "text":
        raise ConfigError(f"data.block_length is for text, and {entry.name} is none")
    if data.missing is not None and len(entry.input_shape) != 2:
        raise ConfigError(f"data.missing is for time series, and {entry.name} is none")
    if data.missing is None and data.stride != 1:
        raise ConfigError("data.stride is for time series that are sampled irregularly: set data.missing as well")
    return replace(data, name=entry.name)


def _read_network(table: Mapping[str, Any]) -> NetworkConfig:
    options = dict(table)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in NETWORKS:
        raise ConfigError(f"network.name must be one of {', '.join(NETWORKS)}, got {name!r}")
    known = options_of(NETWORKS[name], skip=("input_shape", "classes"))
    return NetworkConfig(name, read_options(known, options, "network"))


def _check_match(data: DataConfig, network: NetworkConfig) -> None:
    """A network that reads text needs one, and a text needs such a network; likewise for densities and series."""
    density = find_entry(data.name).task == "density"
    if density and network.name not in DENSITIES:
        raise ConfigError(f"data.name: {data.name} has no classes, and {network.name} classifies: it needs a flow")
    if not density and network.name in DENSITIES:
        raise ConfigError(f"network.name: {network.name} is a density, and {data.name} has classes")
    if network.name in READ_SERIES and data.missing is None:
        raise ConfigError(f"data.missing must be a number from 0 to 1: {network.name} reads time series with gaps")
    if find_entry(data.name).task == "text" and network.name not in READ_TEXT:
        raise ConfigError(f"network.name must be {' or '.join(READ_TEXT)} for text, got {network.name!r}")
    if find_entry(data.name).task != "text" and network.name in READ_TEXT:
        raise ConfigError(f"network.name: {network.name} reads text, and {data.name} is none")


def load_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a file, or one sentence why not."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("there is no such file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"this is not TOML: {error}") from None


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put the name of the file in front of what is wrong with it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from None

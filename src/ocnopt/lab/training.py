"""From a folder with a configuration to a finished run: data, checkpoint, journal, trainer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch

from ocnopt.lab import data
from ocnopt.lab.config import DataConfig, RunConfig, read_run
from ocnopt.lab.runs import MetricsWriter, Record, RunError, RunFolder, finite
from ocnopt.lab.schema import naming_key
from ocnopt.lab.tensorboard import TensorBoard
from ocnopt.lab.trainer import Journal, Trainer
from ocnopt.lab.world import World, describe_environment

Folder = str | os.PathLike[str]
Listener = Callable[[Record], None]


def train(
    folder: RunFolder,
    *,
    device: torch.device | str = "cpu",
    world: World | None = None,
    data_dir: Folder | None = None,
    download: bool = False,
    tensorboard: bool = False,
    listen: Listener | None = None,
) -> Record:
    """Do what is left of the run in this folder: all of it, the rest after its last checkpoint, or nothing.

    A run that is killed at any moment and continued writes the same metrics as one that is not, apart from the
    seconds: bit for bit on the same machine with the same number of threads and processes. (Where a network draws
    random numbers and several processes train it, only the main process takes up its own sequence again.)

    Args:
        folder: holds the configuration already, see :meth:`RunFolder.create`.
        device: where to train.
        world: the processes that train together; every one of them calls this function.
        data_dir, download: as in :func:`ocnopt.lab.data.load`.
        tensorboard: write TensorBoard files as well, in a folder inside that of the run.
        listen: called with every record, in the main process; first with ``{"kind": "begin", "step", "steps"}``,
            where it stands and how far it is to go.

    Returns:
        The ``final`` record.
    """
    world, device = world or World(), torch.device(device)
    config = read_run(folder.config_path)
    done = world.agree(folder.final() if world.is_main else None)
    if done is not None:
        if listen is not None and world.is_main:
            listen(done)
        return done
    dataset = load_data(config.data, data_dir, download)
    with folder.locked() if world.is_main else nullcontext():
        state = world.agree(folder.load_checkpoint() if world.is_main else None)
        with _journal(folder, state, tensorboard, listen) if world.is_main else nullcontext(Silence()) as journal:
            trainer = Trainer(config, dataset, journal, device=device, world=world)
            if state is not None:
                _take_up(trainer, state, folder)
            if world.is_main:
                now = {**describe_environment(device, world), "data": describe_data(dataset)}
                _note_environment(folder, now)
                if listen is not None:
                    listen({"kind": "begin", "step": trainer.step, "steps": trainer.steps})
            with _deterministic():
                return _plain(trainer.train())


def rehearse(
    config: RunConfig, *, world: World | None = None, data_dir: Folder | None = None, download: bool = False
) -> None:
    """Raise what a run would raise before its first step, without leaving anything behind."""
    Trainer(config, load_data(config.data, data_dir, download), Silence(), world=world)


def load_data(config: DataConfig, data_dir: Folder | None = None, download: bool = False) -> data.Dataset:
    """The dataset of a configuration, with the parts and the sizes that it asks for."""
    place = None if data_dir is None else os.fspath(data_dir)
    dataset = _load(config.name, place, download, config.split_seed, config.block_length or data.BLOCK_LENGTH)
    dataset = dataset.limited(config.train_limit, config.test_limit)
    if config.missing is not None:
        dataset = data.irregular(dataset, config.missing, stride=config.stride, seed=config.split_seed)
    if not config.validation:
        return dataset
    with naming_key("data.validation: "):
        return dataset.with_validation(config.validation, config.split_seed)


@lru_cache(maxsize=2)  # a worker trains on the same data again and again
def _load(name: str, data_dir: str | None, download: bool, split_seed: int, block_length: int) -> data.Dataset:
    return data.load(name, data_dir, download=download, split_seed=split_seed, block_length=block_length)


@contextmanager
def _deterministic() -> Iterator[None]:
    """The same numbers in every run. Not ``cudnn.flags``: its defaults switch cuDNN itself off."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.backends.cudnn.deterministic = before


def describe_data(dataset: data.Dataset) -> Record:
    """What a reader of results must know of the samples: how many there were, and whether these are all."""
    validation = 0 if dataset.validation is None else len(dataset.validation)
    return {
        "train": len(dataset.train),
        "validation": validation,
        "test": len(dataset.test),
        "subset": dataset.subset,
        "notes": list(dataset.notes),
        "source": dataset.source,
    }


def _take_up(trainer: Trainer, state: dict[str, Any], folder: RunFolder) -> None:
    try:
        trainer.load_state_dict(state)
    except ValueError as error:  # it trained on other data, most likely
        raise RunError(f"{folder.path} cannot be continued here: {error}") from None


class RunJournal:
    """Writes into the folder of a run, and tells whoever listens."""

    def __init__(
        self, folder: RunFolder, writer: MetricsWriter, board: TensorBoard | None, listen: Listener | None
    ) -> None:
        self._folder, self._writer, self._board, self._listen = folder, writer, board, listen

    def write(self, record: Record) -> None:
        record = _plain(record)
        self._writer.write(record)
        if self._board is not None:
            self._board.write(record)
        if self._listen is not None:
            self._listen(record)

    def save(self, state: dict[str, Any]) -> None:
        # The metrics first: a checkpoint must never be ahead of them.
        self._folder.save_checkpoint({**state, "metrics_bytes": self._writer.sync()})


class Silence:
    """The journal of every process but the main one."""

    def write(self, record: Record) -> None:
        pass

    def save(self, state: dict[str, Any]) -> None:
        pass


@contextmanager
def _journal(
    folder: RunFolder, state: dict[str, Any] | None, tensorboard: bool, listen: Listener | None
) -> Iterator[Journal]:
    """Go on where the checkpoint was taken; without one, from the beginning."""
    step, size = (0, 0) if state is None else (state["step"], state["metrics_bytes"])
    writer = MetricsWriter(folder.metrics_path, keep=size)
    board = TensorBoard(folder.path / "tensorboard", step) if tensorboard else None
    try:
        yield RunJournal(folder, writer, board, listen)
    finally:
        writer.close()
        if board is not None:
            board.close()


def _note_environment(folder: RunFolder, now: dict[str, Any]) -> None:
    """That of the first start; those of later ones are listed inside it."""
    first = folder.environment()
    folder.write_environment({**first, "resumed": [*first.get("resumed", []), now]} if first else now)


def _plain(record: Record) -> Record:
    plain: Record = finite(record)
    return plain

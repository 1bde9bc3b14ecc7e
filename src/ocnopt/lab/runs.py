"""Runs on disk: one folder a run, readable while it is written and after any crash.

==================== ==========================================================================================
``config.toml``      the complete configuration (:mod:`ocnopt.lab.config`); ``label`` names the line of a table
``environment.json`` versions, device, threads and data that the run had
``metrics.jsonl``    one JSON object a line, appended and flushed
``checkpoint.pt``    model, optimizer, position in the data; replaced as a whole, loads with ``weights_only=True``
==================== ==========================================================================================

Every record of the metrics has a ``kind``; numbers that are not finite are ``null``:

- ``step``: ``step, epoch, loss, lr, seconds``: every so many steps; ``loss`` is that of the batch before the step,
  ``seconds`` the time spent on training so far, without evaluations; ``horizons`` holds the final times that Neural
  ODEs have learned, by the names of the blocks, where there are some;
- ``epoch``: ``epoch, step, train_loss, test_loss, test_accuracy, seconds``, where ``epoch`` counts complete epochs and
  ``train_loss`` is the mean over the epoch; with a validation part also ``validation_loss, validation_accuracy``. A
  density has losses (the negative log-likelihood) and no accuracies;
- ``layers``: ``step, layers: [{name, trace, w_min, w_max, s, clamped, projections}]``: what the feedback of OCNOpt did
  in the last step of an epoch (:class:`ocnopt.LayerReport`);
- ``alignment``: ``step, rounds, late by 0, late by 1, …``: where OCNOpt's alignment is adaptive, how many rewards it
  has had at the end of an epoch, and the chance of each choice to be the next one;
- ``final``: ``test_accuracy, test_loss, train_loss, seconds, diverged``: the last line of a run that has ended.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import filelock
import torch

from ocnopt.lab import toml

Record = dict[str, Any]


class RunError(Exception):
    """A run folder is not what it should be. One sentence that says what to do."""


def read_metrics(path: str | os.PathLike[str]) -> list[Record]:
    """All complete records of a ``metrics.jsonl`` file; none where there is no file yet.

    A line counts once its line feed is there, so what a running or killed writer left half-written is not seen. A line
    in between that is no record (a disk that was full, a machine that lost its power) is left out, with a warning.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    records, torn = [], []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        record = _record(line)
        if record is None:
            torn.append(number)
        else:
            records.append(record)
    if torn:
        lines = f"line {torn[0]} is" if len(torn) == 1 else f"lines {', '.join(map(str, torn))} are"
        warnings.warn(f"{os.fspath(path)}: {lines} no record of a run and left out", stacklevel=2)
    return records


def _record(line: bytes) -> Record | None:
    """``None`` where the line is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


class MetricsWriter:
    """Append records to a file, each in a single flushed write."""

    def __init__(self, path: Path, keep: int | None = None) -> None:
        """``keep``: go on after this many bytes (a checkpoint's), forgetting what came later. By default
        everything is kept but a half-written last line.
        """
        self._file: BinaryIO = path.open("a+b", buffering=0)
        try:
            self._file.truncate(_complete_bytes(self._file, path, keep))
        except BaseException:
            self._file.close()
            raise

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(finite(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        self._file.write(line.encode() + b"\n")

    def sync(self) -> int:
        """Make sure that everything is on the disk, and say how many bytes that is."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


def _complete_bytes(file: BinaryIO, path: Path, keep: int | None) -> int:
    file.seek(0)
    data = file.read()
    if keep is None:
        return data.rfind(b"\n") + 1
    if keep > len(data) or (keep and data[keep - 1 : keep] != b"\n"):
        raise RunError(f"{path} does not reach as far as the checkpoint beside it: the run cannot be continued")
    return keep


class RunFolder:
    """One run on disk. Nothing is read or written before it is asked for."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def environment_path(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoint_path(self) -> Path:
        return self.path / "checkpoint.pt"

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: Mapping[str, Any]) -> RunFolder:
        """Make the folder and write its configuration; refuses a folder that has one already."""
        folder = cls(path)
        if folder.exists():
            raise RunError(f"{folder.path} holds a run already: continue it with --resume, or name another folder")
        folder.path.mkdir(parents=True, exist_ok=True)
        replace_file(folder.config_path, toml.dumps(config).encode())
        return folder

    def exists(self) -> bool:
        return self.config_path.is_file()

    def config(self) -> dict[str, Any]:
        """``config.toml`` as it stands, unchecked; :func:`ocnopt.lab.config.read_run` gives it types."""
        if not self.exists():
            raise RunError(f"{self.path} holds no run: there is no {self.config_path.name} in it")
        try:
            return tomllib.loads(self.config_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RunError(f"{self.config_path} is no configuration of a run: {error}") from None

    def environment(self) -> dict[str, Any]:
        """Versions, device, threads and data; empty for a run that has not begun."""
        if not self.environment_path.is_file():
            return {}
        try:
            environment: dict[str, Any] = json.loads(self.environment_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RunError(f"{self.environment_path} is no record of an environment: {error}") from None
        return environment

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        replace_file(self.environment_path, (json.dumps(environment, indent=2) + "\n").encode())

    def metrics(self, kind: str | None = None) -> list[Record]:
        """The records so far, of one kind or of all."""
        return [r for r in read_metrics(self.metrics_path) if kind is None or r["kind"] == kind]

    def final(self) -> Record | None:
        """The last record of a run that has ended, ``None`` for one that has not."""
        return next(iter(self.metrics("final")), None)

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        with _replacing(self.checkpoint_path) as file:
            torch.save(dict(state), file)

    def load_checkpoint(self, device: torch.device | str = "cpu") -> dict[str, Any] | None:
        """``None`` where no checkpoint was written yet."""
        if not self.checkpoint_path.is_file():
            return None
        try:
            state: dict[str, Any] = torch.load(self.checkpoint_path, map_location=device, weights_only=True)
        except OSError:
            raise
        except Exception:  # what a damaged file makes torch raise is anybody's guess: EOFError, IndexError, ...
            raise RunError(
                f"{self.checkpoint_path} is damaged: put a copy in its place, or delete it to begin the run anew"
            ) from None
        return state

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from writing here. The system takes the lock off a process that dies."""
        lock = filelock.FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise RunError(f"{self.path} is being written by another process") from None
        try:
            yield
        finally:
            lock.release()


def find_runs(paths: Iterable[str | os.PathLike[str]]) -> list[RunFolder]:
    """The run folders among these folders and below them, each once, sorted by path."""
    found: dict[Path, RunFolder] = {}
    for path in map(Path, paths):
        if not path.is_dir():
            raise RunError(f"there is no folder {path}")
        for config in sorted(path.rglob("config.toml")):
            found.setdefault(config.parent.resolve(), RunFolder(config.parent))
    return list(found.values())


def finite(value: Any) -> Any:
    """The same value with ``None`` for every number that is not finite: JSON has no word for those."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return value


def replace_file(path: Path, content: bytes) -> None:
    """Write a file as a whole: a reader sees the old content or the new one, also after a crash."""
    with _replacing(path) as file:
        file.write(content)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    part = path.with_name(f".{path.name}.part")  # a killed writer leaves one behind; the next one overwrites it
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)

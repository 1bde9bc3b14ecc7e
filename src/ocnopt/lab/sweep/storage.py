"""Where the state of a sweep lives, and whose turn it is to change it."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock
import sqlalchemy
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RDBStorage
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool


@dataclass(frozen=True)
class Pulse:
    """How a worker shows that it is alive, in seconds.

    Attributes:
        interval: between two signs of life.
        grace: without a sign for so long, a worker counts as dead and its trial is taken up by another. The times are
            those of the database, so the clocks of the machines need not agree.
    """

    interval: int = 10
    grace: int = 60

    def __post_init__(self) -> None:
        if not 1 <= self.interval < self.grace:
            raise ValueError(f"grace must be longer than the interval of {self.interval} s ≥ 1 s, got {self.grace}")


def storage_url(storage: str) -> URL:
    """A database URL from what a user writes: the path of a SQLite file, or a SQLite or PostgreSQL URL."""
    if "://" not in storage:
        return URL.create("sqlite", database=storage)
    try:
        url = make_url(storage)
    except ArgumentError:
        raise ValueError(f"storage must be a file or a database URL, got {storage!r}") from None
    kind = url.get_backend_name()
    if kind in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    if kind != "sqlite" or url.database in (None, "", ":memory:"):
        raise ValueError(
            f"storage must be a SQLite file or a PostgreSQL database, got {url.render_as_string(hide_password=True)}"
        )
    return url


def open_storage(url: URL, pulse: Pulse) -> RDBStorage:
    """Connect, and create the tables where there are none: only inside :func:`turn`."""
    options: dict[str, object] = {"pool_pre_ping": True}  # the database may have been restarted in between
    if url.get_backend_name() == "sqlite":
        Path(str(url.database)).absolute().parent.mkdir(parents=True, exist_ok=True)
        options["connect_args"] = {"timeout": 60}  # seconds that a writer waits for the other writers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return RDBStorage(
            url.render_as_string(hide_password=False),
            engine_kwargs=options,
            heartbeat_interval=pulse.interval,
            grace_period=pulse.grace,
        )


@contextmanager
def turn(url: URL, study: str) -> Iterator[None]:
    """Be the only one who hands out trials. The system takes the turn from a process that dies."""
    if url.get_backend_name() == "sqlite":
        path = Path(str(url.database)).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock"):
            yield
        return
    engine = sqlalchemy.create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:  # the lock lives as long as the connection
        for setting, seconds in (("idle", 30), ("interval", 10), ("count", 3)):  # a machine may vanish without a word
            connection.execute(sqlalchemy.text(f"SET tcp_keepalives_{setting} = {seconds}"))
        connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:key)"), {"key": _lock_number(study)})
        yield


def _lock_number(study: str) -> int:
    return int.from_bytes(hashlib.sha256(f"ocnopt sweep {study}".encode()).digest()[:8], signed=True)

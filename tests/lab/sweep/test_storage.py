"""Storages as users write them, and taking turns."""

import threading
import time

import pytest

from ocnopt.lab.sweep.storage import Pulse, storage_url, turn


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("out/sweep.db", "sqlite:///out/sweep.db"),
        ("/tmp/a b.db", "sqlite:////tmp/a b.db"),
        ("sqlite:///x.db", "sqlite:///x.db"),
        ("postgresql://me@host/db", "postgresql+psycopg://me@host/db"),
        ("postgres://me@host:5433/db?sslmode=require", "postgresql+psycopg://me@host:5433/db?sslmode=require"),
        ("postgresql+psycopg2://host/db", "postgresql+psycopg://host/db"),
    ],
)
def test_storage_url(given: str, url: str) -> None:
    assert str(storage_url(given)) == url


@pytest.mark.parametrize("given", ["mysql://me:secret@host/db", "sqlite://", "sqlite:///:memory:"])
def test_storage_that_cannot_be_shared_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"^storage must be a SQLite file or a PostgreSQL database") as refused:
        storage_url(given)
    assert "secret" not in str(refused.value)


def test_pulse_needs_time_between_signs_of_life() -> None:
    with pytest.raises(ValueError, match="grace must be longer than the interval of 5 s"):
        Pulse(interval=5, grace=5)


def test_one_at_a_time(storage: str, study: str) -> None:
    url, inside, most = storage_url(storage), [0], [0]

    def visit() -> None:
        for _ in range(5):
            with turn(url, study):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.005)
                inside[0] -= 1

    threads = [threading.Thread(target=visit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]

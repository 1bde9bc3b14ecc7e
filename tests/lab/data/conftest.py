"""No test of this folder may see the data or the cache of the person who runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ocnopt.lab.data import registry
from ocnopt.lab.data.locate import CACHE_VARIABLE, DATA_VARIABLE

Publish = Callable[..., None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no ``OCNOPT_DATA``. (The tests of real files keep its value from before.)"""
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def publish(monkeypatch: pytest.MonkeyPatch) -> Publish:
    """Change a row of the table of datasets: ``publish("MNIST", remotes=…)``."""

    def change(name: str, **changes: object) -> None:
        entry = replace(registry.ENTRIES[name], **changes)  # type: ignore[arg-type]
        monkeypatch.setitem(registry.ENTRIES, name, entry)
        monkeypatch.setitem(registry._BY_PLAIN_NAME, registry.plain(name), entry)

    return change

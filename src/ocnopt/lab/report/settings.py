"""Settings of runs as flat tables, and names that say no more than what tells things apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ocnopt.lab.report.text import plain

Settings = tuple[tuple[str, str], ...]


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """``{"optimizer": {"lr": 0.1}}`` becomes ``optimizer.lr: 0.1``."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", plain(value)


def distinct(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """For each key the values that occur, in order of appearance; keys of one table stay together."""
    found: dict[str, dict[str, None]] = {}
    for table in tables:
        for key, value in flatten(table):
            found.setdefault(key, {})[value] = None
    tops = list(dict.fromkeys(key.partition(".")[0] for key in found))
    ordered = sorted(found, key=lambda key: tops.index(key.partition(".")[0]))
    return {key: list(found[key]) for key in ordered}


def differing(group: Sequence[Settings]) -> list[str]:
    """The keys in which these settings are not all the same."""
    tables = [dict(settings) for settings in group]
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if len({table.get(key) for table in tables}) > 1]


def listed(settings: Settings, keys: Sequence[str]) -> str:
    """``batch_size = 32, epochs = 5``"""
    return ", ".join(f"{key.rpartition('.')[2]} = {value}" for key, value in settings if key in keys)


def distinguish(items: Sequence[tuple[str, Settings]]) -> list[str]:
    """A name for each: with those settings in which items of the same name differ."""
    keys = {name: differing([settings for n, settings in items if n == name]) for name, _ in items}
    return [f"{name} ({listed(settings, keys[name])})" if keys[name] else name for name, settings in items]

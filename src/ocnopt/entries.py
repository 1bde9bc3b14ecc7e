"""Entries of dictionaries, as they were: many, and compared in every step, those of one dictionary at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch

#: what is what it was if it is equal, and cannot be changed without being replaced
PLAIN = (bool, int, float, str, tuple, type(None), torch.dtype, torch.device, torch.memory_format)


class Entries:
    def __init__(self, entries: Sequence[tuple[dict[str, Any], str]]) -> None:
        """``entries``: a dictionary and a key that is in it."""
        owners = {id(owner): owner for owner, _ in entries}
        names: dict[int, list[str]] = {key: [] for key in owners}
        for owner, name in entries:
            names[id(owner)].append(name)
        # of one name an ``itemgetter`` returns no tuple
        self._looks = [(itemgetter(*names[key], names[key][-1]), owner) for key, owner in owners.items()]
        self.values = self._now()

    def unchanged(self) -> bool:
        """Is every value equal to what it was?"""
        try:
            return self._now() == self.values
        except Exception:  # one is gone, or cannot be compared, such as a tensor
            return False

    def untouched(self) -> bool:
        """Is every value the very object that it was?"""
        try:
            return all(map(is_, self._now(), self.values))
        except KeyError:
            return False

    def _now(self) -> list[Any]:
        return [*chain.from_iterable([look(owner) for look, owner in self._looks])]

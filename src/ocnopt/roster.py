"""Who plays: the players of the parameter groups, remembered as long as nothing about them changes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from ocnopt.fallbacks import Fallbacks
from ocnopt.layers import Adapter
from ocnopt.players import Player, gather
from ocnopt.shelves import Shelves


class Roster:
    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._players: list[Player] = []
        self._looked_at: list[Player] | None = None
        self._alone: dict[tuple[Player, int], Player] = {}
        self.shelves = Shelves()

    def players(self, groups: Sequence[dict[str, Any]], model: nn.Module | None) -> list[Player]:
        """The same list, as long as nothing has changed."""
        params = [p for group in groups for p in group["params"]]
        key = (
            [(id(g), len(g["params"]), g["curvature"]) for g in groups],
            [next(i for i, h in enumerate(groups) if _same_rate(h["lr"], g["lr"])) for g in groups],
            list(map(id, params)),
            list(map(type, params)),  # others put parts in their places
            list(map(attrgetter("requires_grad", "dtype", "device"), params)),
        )
        if self._key != key:
            self._key, self._players, self._alone = key, gather(groups, model), {}
        return self._players

    def acting(self, players: list[Player], fallbacks: Fallbacks) -> list[Player]:
        """The players with gradients. Of a layer's block with some, each parameter that has one acts by itself."""
        fallbacks.reasons.clear()
        if players is not self._looked_at:
            fallbacks.shared(players)
            self._looked_at = players
        if all(q.grad is not None for player in players for q in player.params):
            return players
        acting: list[Player] = []
        for player in players:
            have = [q.grad is not None for q in player.params]
            if all(have):
                acting.append(player)
                continue
            for i in (i for i, there in enumerate(have) if there):
                alone = self._alone.setdefault((player, i), player.alone(i))
                fallbacks.say(alone.name, "the rest of its layer has no gradient", "its curvature is adaptive")
                acting.append(alone)
        return acting


def read_in_sums(players: Sequence[Player]) -> dict[str, Adapter]:
    """The modules of whose calls curvatures read nothing but sums, with their adapters."""
    readers = [(u, p) for p in players if p.curvature.needs_model for u in p.uses[0] if u.host is None]
    kept = {use.module_name for use, player in readers if not player.curvature.takes_tallies}
    found = {use.module_name: use.adapter for use, _ in readers if use.module_name not in kept}
    return {name: adapter for name, adapter in found.items() if adapter is not None}


def _same_rate(a: float | Tensor, b: float | Tensor) -> bool:
    """Tensors are compared by identity: their values are on the device."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)

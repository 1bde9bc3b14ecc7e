"""Stages: in which order the players act."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ocnopt.players import Player


@dataclass
class Stages:
    """One stage for each module that holds parameters, in the order in which the modules are first used."""

    of_player: Mapping[int, int]  # id(player) → stage
    of_module: Mapping[str, int]  # the module before whose first call the stage acts
    names: list[str]
    uncalled: list[int]  # stages whose players no call was seen of: they act first

    @classmethod
    def assign(cls, players: Sequence[Player], order: Sequence[str] | None) -> Stages:
        """``order``: module names in the order of their calls; ``None``: not known, and every player is a stage by
        itself.
        """
        if order is None:
            return cls({id(p): k for k, p in enumerate(players)}, {}, [p.name for p in players], [])
        first: dict[str, int] = {}
        for k, name in enumerate(order):
            first.setdefault(name, k)
        key = {id(p): min((first[n] for n in p.module_names if n in first), default=-1) for p in players}
        rank = {k: i for i, k in enumerate(sorted(set(key.values())))}
        names = ["(never called)" if k < 0 else order[k] or "(the model itself)" for k in rank]
        of_module = {order[k]: i for k, i in rank.items() if k >= 0}
        return cls({i: rank[k] for i, k in key.items()}, of_module, names, [rank[-1]] if -1 in rank else [])

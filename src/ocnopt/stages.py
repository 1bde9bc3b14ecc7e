"""Stages and seats: who acts when, and who acts together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from ocnopt.games.flow import name_of
from ocnopt.games.schedule import Placement
from ocnopt.players import Player


@dataclass
class Stages:
    """A *seat* is a module that holds parameters (or a parameter outside all of them); the seats of a stage act on the
    same state.
    """

    seat_of: Mapping[int, int]  # id(player) → seat
    stage_of: list[int]  # seat → stage; stages without gaps
    modules: list[str]  # the name of each seat
    uncalled: list[int] = field(default_factory=list)  # stages of players that no call was seen of: they act first
    at: dict[int, int] = field(default_factory=dict)  # stage of the data flow → stage; some have nobody to act
    of_module: dict[str, int] = field(init=False)  # the module before whose first call a stage acts → stage

    def __post_init__(self) -> None:
        self.of_module = dict(zip(self.modules, self.stage_of, strict=True))
        self.seats: list[list[int]] = [[] for _ in range(max(self.stage_of, default=-1) + 1)]
        for seat, stage in enumerate(self.stage_of):
            self.seats[stage].append(seat)

    @property
    def names(self) -> list[str]:
        return [name or "(the model itself)" for name in self.modules]

    def of(self, player: Player) -> int:
        """The stage of a player."""
        return self.stage_of[self.seat_of[id(player)]]

    @property
    def count(self) -> int:
        return len(self.seats)

    @classmethod
    def in_order(cls, players: Sequence[Player], order: Sequence[str] | None, joining: Collection[str] = ()) -> Stages:
        """One stage for each module, with those called next that join it, in the order of their calls; ``None``: not
        known, and every player is a stage by itself.
        """
        if order is None:
            return cls({id(p): k for k, p in enumerate(players)}, list(range(len(players))), [p.name for p in players])
        turns: dict[str, int] = {}  # of the first call of each
        stages = [-1]  # of each call, after that of what is never called
        for turn, name in enumerate(order):
            turns.setdefault(name, turn)
            stages.append(stages[-1] + (turn == 0 or name not in joining))
        acts = sorted(((player, *_first(player, turns)) for player in players), key=lambda act: act[1])
        return cls._gathered([player for player, *_ in acts], [(stages[turn + 1], name) for _, turn, name in acts])

    @classmethod
    def placed(cls, players: Sequence[Player], placement: Placement, model: nn.Module) -> Stages:
        """The stages of a data flow. A player that is used several times acts at its first use."""
        first: dict[str, int] = {}
        loose: dict[int, int] = {}  # parameters that operations read
        for node, k in placement.stage.items():
            if node.op == "call_module":
                first[name_of(node)] = min(k, first.get(name_of(node), k))
            elif node.meta.get("parameter"):
                loose[id(model.get_parameter(str(node.target)))] = k
        acts = []
        for player in players:
            k, name = _first(player, first)
            used = min((loose[id(p)] for p in player.params if id(p) in loose), default=-1)
            acts.append((used, player.name) if used >= 0 and (k < 0 or used < k) else (k, name))
        return cls._gathered(players, acts)

    @classmethod
    def _gathered(cls, players: Sequence[Player], acts: Sequence[tuple[int, str]]) -> Stages:
        """``acts``: when each player acts (−1: it was never seen to), and as part of what."""
        by_seat: dict[tuple[int, str], list[Player]] = defaultdict(list)
        for act, player in zip(acts, players, strict=True):
            by_seat[act].append(player)
        seats = sorted(by_seat, key=lambda act: act[0])  # stable: in the order of the players within a stage
        rank = {k: i for i, k in enumerate(sorted({k for k, _ in seats}))}
        seat_of = {id(player): seat for seat, act in enumerate(seats) for player in by_seat[act]}
        stage_of, modules = [rank[k] for k, _ in seats], [name for _, name in seats]
        return cls(
            seat_of, stage_of, modules, [rank[-1]] if -1 in rank else [], {k: i for k, i in rank.items() if k >= 0}
        )


def _first(player: Player, first: Mapping[str, int]) -> tuple[int, str]:
    """The earliest stage among those of a player's modules, and the module."""
    return min(((first[n], n) for n in player.module_names if n in first), default=(-1, "(never called)"))

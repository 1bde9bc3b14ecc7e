"""Which players go into one bucket: sorted once, and again only where something about them has changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ocnopt import shards
from ocnopt.curvature import Curvature
from ocnopt.distributed import World
from ocnopt.fused.tables import Layout
from ocnopt.gradients import GroupGradients
from ocnopt.players import Player
from ocnopt.stages import Stages

States = Mapping[Tensor, dict[str, Any]]


@dataclass
class Shelf:
    """Players that share hyper-parameters, metric, device, dtype, clock and form of gradients."""

    group: dict[str, Any]
    curvature: Curvature
    players: list[Player]
    params: list[Tensor]
    states: list[dict[str, Any]]  # of each parameter
    peers: Sequence[Player]  # all players of the step that have this curvature
    seats: list[int]  # of each player
    owners: World  # the processes that hold a part of each parameter
    kind: type[GroupGradients]
    clock_is_new: bool  # has nobody on this shelf taken a step before?
    layout: Layout | None = None  # for fused kernels, once there are any
    _selected: dict[tuple[int, ...], tuple[Shelf, list[int]] | None] = field(default_factory=dict)
    _chunks: dict[tuple[int, ...], list[tuple[int, int]]] = field(default_factory=dict)

    def select(self, seats: Sequence[int]) -> tuple[Shelf, list[int]] | None:
        """The players of some seats, if any, and which of the parameters are theirs."""
        key = tuple(seats)
        if key not in self._selected:
            self._selected[key] = self._select(key)
        return self._selected[key]

    def _select(self, seats: tuple[int, ...]) -> tuple[Shelf, list[int]] | None:
        chosen = [i for i, theirs in enumerate(self.seats) if theirs in seats]
        if not chosen:
            return None
        ends = list(accumulate((len(player.params) for player in self.players), initial=0))
        index = [j for i in chosen for j in range(ends[i], ends[i + 1])]
        few = replace(
            self,
            players=[self.players[i] for i in chosen],
            seats=[self.seats[i] for i in chosen],
            params=[self.params[j] for j in index],
            states=[self.states[j] for j in index],
            layout=None,
            _selected={},
            _chunks={},
        )
        return few, index

    @cached_property
    def _in_parts(self) -> bool:
        return any(map(shards.is_sharded, self.params))

    def parts(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Of parameters, gradients or state: what this process holds."""
        return shards.parts(tensors) if self._in_parts else list(tensors)

    def chunks(self, seats: Sequence[int]) -> list[tuple[int, int]]:
        """Of the players of some seats, for fused kernels: the first of each run, and how many."""
        key = tuple(seats)
        if key not in self._chunks:
            selected = self.select(key)
            assert self.layout is not None
            self._chunks[key] = [] if selected is None else self.layout.runs(selected[1])
        return self._chunks[key]

    @cached_property
    def parameter_seats(self) -> list[int]:
        return [seat for seat, player in zip(self.seats, self.players, strict=True) for _ in player.params]


class Shelves:
    def __init__(self) -> None:
        self._shelves: list[Shelf] = []
        self.names: tuple[str, ...] = ()  # of the player of each parameter, shelf by shelf
        self.everybody: list[World] = []  # see :func:`shards.everybody`
        self._key: tuple[Any, ...] | None = None
        self._objects: list[Any] = []

    def of(
        self, players: list[Player], stages: Stages, kinds: Sequence[type[GroupGradients]], state: States
    ) -> list[Shelf]:
        """Parameters get a clock when they first step. ``kinds``: the form of gradients of each player."""
        states = [state[q] for player in players for q in player.params]
        clocks = [own.get("step") for own in states]
        key, objects = (players, kinds, len(state)), [stages, *states, *clocks]
        if self._key != key or len(objects) != len(self._objects) or not all(map(is_, objects, self._objects)):
            started = _start_clocks(players, state)
            _stop_clocks(players, state)
            self._shelves = _sorted(players, stages, kinds, state, started)
            self.names = tuple(p.name for shelf in self._shelves for p in shelf.players for _ in p.params)
            self.everybody = shards.everybody(q for player in players for q in player.params)
            self._key = list(players), list(kinds), len(state)
            self._objects = [stages, *states, *(own["step"] for own in states)]
        return self._shelves


def _sorted(
    players: list[Player],
    stages: Stages,
    kinds: Sequence[type[GroupGradients]],
    state: States,
    started: Collection[Tensor],
) -> list[Shelf]:
    """``started``: clocks that were not there before."""
    new = {id(clock) for clock in started}
    alike: dict[tuple[Any, ...], list[Player]] = defaultdict(list)
    for player, kind in zip(players, kinds, strict=True):
        first = player.params[0]
        clock, owners = state[first]["step"], shards.owners(first)
        alike[id(player.group), player.curvature, first.device, first.dtype, id(clock), owners, kind].append(player)
    shelves = []
    for (_, curvature, *_, owners, kind), theirs in alike.items():
        params = [q for p in theirs for q in p.params]
        peers = [p for p in players if p.curvature is curvature]
        seats, states = [stages.seat_of[id(p)] for p in theirs], [state[q] for q in params]
        is_new = id(states[0]["step"]) in new
        shelves.append(Shelf(theirs[0].group, curvature, theirs, params, states, peers, seats, owners, kind, is_new))
    return shelves


def _start_clocks(players: Sequence[Player], state: States) -> Collection[Tensor]:
    """Parameters that start together share one. Returns those that were started."""
    fresh: dict[torch.device, Tensor] = {}
    for p in (q for player in players for q in player.params):
        if not state[p]:
            state[p]["step"] = fresh.setdefault(p.device, torch.zeros((), dtype=torch.float32, device=p.device))
    return fresh.values()


def _stop_clocks(players: Sequence[Player], state: States) -> None:
    """A parameter without a gradient stands still, so it must not share a clock with those that step."""
    stepping = {id(q) for player in players for q in player.params}
    ticking = {id(own["step"]) for p, own in state.items() if id(p) in stepping and own}
    stopped: dict[int, Tensor] = {}
    for p, own in state.items():
        if own and id(p) not in stepping and id(own["step"]) in ticking:
            own["step"] = stopped.setdefault(id(own["step"]), own["step"].clone())

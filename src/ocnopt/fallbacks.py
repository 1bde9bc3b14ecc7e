"""Layers whose calls cannot be read as the configuration asks. What stands in is said once, by name, never silently."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

from torch import Tensor

from ocnopt import hosts
from ocnopt.capture import Tape
from ocnopt.curvature import BY_NAME
from ocnopt.distributed import World
from ocnopt.forms import Calls
from ocnopt.players import Player
from ocnopt.probe import mixed_layers
from ocnopt.records import Folded


class Verdict(IntEnum):
    """What a process makes of the calls of a player. Of several processes, the largest counts."""

    ABSENT = 0  # it has none: there may be others
    FINE = 1
    NOT_TOLD = 2  # a host was not asked, or could not tell: this step teaches nothing about the player
    UNUSABLE = 3


_ABSENT, _ELSEWHERE = "its calls were not seen", "its calls are of no use on another process"


class Fallbacks:
    """Found anew at each step: an odd step leaves no trace in the steps after it."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}  # of the last step, by name of player
        self._mixed: dict[tuple[Any, ...], frozenset[str]] = {}
        self._said: set[tuple[str, str]] = set()
        self._demoted: dict[int, tuple[Player, Player]] = {}
        self._last: dict[Player, str | None] = {}  # what the last look at the calls of a player told
        self.seen: set[int] = set()  # ids of players whose calls are of use in this step, on this process or another

    def players(
        self, tape: Tape, players: Sequence[Player], split: bool, state: Mapping[Tensor, dict[str, Any]], world: World
    ) -> list[Player]:
        """The players of this step: with adaptive curvature where the calls that theirs reads are of no use."""
        self.seen = set()
        if not (split or any(p.curvature.needs_model for p in players)):
            return list(players)
        self._probe(tape)

        def due(player: Player) -> bool:
            return player.curvature.due(state.get(player.params[0], {}), player.group, player.inside)

        failed = hosts.ask(tape.records, players, split, lambda p: self._last.get(p) is None and due(p))
        if split or any(map(due, players)):
            self._look(Calls(tape.records), tape.folded, players, world)
        return [self._checked(player, self._why(player, failed, state), split) for player in players]

    def _look(self, calls: Calls, folded: Folded | None, players: Sequence[Player], world: World) -> None:
        """All processes must come to the same verdict: what they add up depends on it."""
        world.must_agree(" ".join(player.name for player in players), "do not have gradients of the same parameters")
        mine = [_verdict(calls, folded or Folded(), player) for player in players]
        theirs = zip(*world.gather_ints([verdict for verdict, _ in mine]), strict=True)
        for player, (verdict, why), worst in zip(players, mine, map(max, theirs), strict=True):
            if worst == Verdict.FINE:
                self._last[player] = None
                self.seen.add(id(player))
            elif worst != Verdict.NOT_TOLD:
                self._last[player] = why if verdict == worst else _ELSEWHERE

    def _why(self, player: Player, failed: Mapping[str, str], state: Mapping[Tensor, dict[str, Any]]) -> str | None:
        """Why the calls of a player are of no use. Between two looks, the last one stands."""
        last, ready = self._last.get(player), player.curvature.ready(state.get(player.params[0], {}))
        if last is not None or ready or id(player) in self.seen:
            return last
        return next((failed[name] for name in player.module_names if name in failed), _ABSENT)

    def _probe(self, tape: Tape) -> None:
        for this in tape.passes:
            mine = [r for r in tape.records if r.origin is this and 0 in r.h]
            key = (this.batch, *((r.name, r.has_rows()) for r in mine))
            if key not in self._mixed:
                self._mixed[key] = mixed_layers(tape, this)
            this.mixed = self._mixed[key]

    def _checked(self, player: Player, why: str | None, split: bool) -> Player:
        needed = player.curvature.needs_model
        if why is None or not (needed or split):
            return player
        effects = ["its gradient is not split into groups of samples"] if split else []
        if needed:
            effects.append("its curvature is adaptive")
        self.say(player.name, why, " and ".join(effects))
        return self._demote(player, why) if needed else player

    def _demote(self, player: Player, why: str) -> Player:
        known = self._demoted.get(id(player))
        if known is None or known[0] is not player:
            note = f"{why}: adaptive curvature"
            known = player, replace(player, curvature=BY_NAME["adaptive"], notes=[*player.notes, note])
            self._demoted[id(player)] = known
        return known[1]

    def uncalled(self, players: Iterable[Player]) -> None:
        """Players of the model whose module was not seen to run, for example inside reentrant checkpointing."""
        for player in players:
            if player.module_names:
                self.say(player.name, _ABSENT, "it acts before the network runs again")

    def say(self, name: str, why: str, effect: str) -> None:
        self.reasons[name] = why
        if (name, why) not in self._said:
            self._said.add((name, why))
            warnings.warn(f"{name}: {why}; {effect}", stacklevel=8)


def _verdict(calls: Calls, folded: Folded, player: Player) -> tuple[Verdict, str | None]:
    first = player.params[0]
    if first in folded.whole:
        return Verdict.UNUSABLE, folded.whole[first]
    if first in folded.columns and not calls.records(player):
        return Verdict.FINE, None
    if not calls.looked_at(player):
        return Verdict.NOT_TOLD, None
    if player.why_no_adapter() is None and not calls.records(player):
        return Verdict.ABSENT, _ABSENT
    why = calls.why_unusable(player)
    return (Verdict.FINE, None) if why is None else (Verdict.UNUSABLE, why)

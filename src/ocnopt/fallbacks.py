"""Layers whose calls cannot be read as the configuration asks. What stands in is said once, by name, never silently."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from torch import Tensor

from ocnopt import hosts
from ocnopt.capture import Tape
from ocnopt.curvature import BY_NAME
from ocnopt.distributed import World
from ocnopt.forms import Calls
from ocnopt.players import Player
from ocnopt.probe import mixed_layers, with_mixed_input
from ocnopt.records import Folded


class Verdict(IntEnum):
    """What a process makes of the calls of a player. Of several processes, the largest counts."""

    ABSENT = 0  # it has none: there may be others
    FINE = 1
    NOT_TOLD = 2  # a host was not asked, or could not tell: this step teaches nothing about the player
    UNUSABLE = 3


Told = tuple[Verdict, str | None]  # and why, if it is of no use
_ABSENT, _ELSEWHERE = "its calls were not seen", "its calls are of no use on another process"


@dataclass
class Pause:
    """After a look at the calls of a player that was of no use. The next step looks again; if that is of no use either,
    one, two, four, … steps are let pass, so that what never can be read costs little.
    """

    why: str | None  # stands as long as it lasts
    length: int = 0
    left: int = 0

    def again(self, why: str | None, longest: int) -> Pause:
        length = min(max(1, 2 * self.length), longest)
        return Pause(why, length, length)


class Fallbacks:
    """Found anew at each step: an odd step leaves no trace in the steps after it."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}  # of the last step, by name of player
        self._mixed: dict[tuple[Any, ...], frozenset[tuple[str, str]]] = {}
        self._said: set[tuple[str, str]] = set()
        self._demoted: dict[int, tuple[Player, Player]] = {}
        self._pauses: dict[Player, Pause] = {}  # of players whose last look was of no use
        self.seen: set[int] = set()  # ids of players whose calls are of use in this step, on this process or another

    def players(
        self, tape: Tape, players: list[Player], split: bool, state: Mapping[Tensor, dict[str, Any]], world: World
    ) -> list[Player]:
        """The players of this step: with adaptive curvature where the calls that theirs reads are of no use."""
        self.seen = set()
        if not (split or any(p.curvature.needs_model for p in players)):
            return players
        self._probe(tape)

        def due(player: Player) -> bool:
            return player.curvature.due(player.kept(state), player.group, player.inside)

        asked = {p for p in players if split or (due(p) and not self._pausing(p))}
        failed = hosts.ask(tape.records, players, split, asked.__contains__)
        told: dict[Player, Told] = {}
        if split or any(map(due, players)):
            told = self._look(Calls(tape.records), tape.folded, players, split, world)
        whys = [self._why(p, told.get(p), p in asked, failed, state) for p in players]
        return [self._checked(player, why, split) for player, why in zip(players, whys, strict=True)]

    def _look(
        self, calls: Calls, folded: Folded | None, players: Sequence[Player], split: bool, world: World
    ) -> dict[Player, Told]:
        """All processes must come to the same verdict: what they add up depends on it."""
        world.must_agree(" ".join(player.name for player in players), "do not have gradients of the same parameters")
        mine = [_verdict(calls, folded, player, split) for player in players]
        theirs = zip(*world.gather_ints([verdict for verdict, _ in mine]), strict=True)
        told: dict[Player, Told] = {}
        for player, (verdict, why), worst in zip(players, mine, map(max, theirs), strict=True):
            told[player] = Verdict(worst), why if verdict == worst else _ELSEWHERE
            if worst == Verdict.FINE:
                self.seen.add(id(player))
        return told

    def _why(
        self,
        player: Player,
        told: Told | None,
        asked: bool,
        failed: Mapping[str, str],
        state: Mapping[Tensor, dict[str, Any]],
    ) -> str | None:
        """Why the calls of a player are of no use in this step. What was learned before is still good if they only
        could not be seen.
        """
        verdict, why = told or (Verdict.NOT_TOLD, None)
        if verdict == Verdict.NOT_TOLD:
            ready = player.curvature.ready(player.kept(state))
            why = None if ready else next((failed[n] for n in player.module_names if n in failed), _ABSENT)
        if not asked and self._pausing(player):
            self._pauses[player].left -= 1
            return self._pauses[player].why
        if verdict == Verdict.FINE or (verdict == Verdict.NOT_TOLD and not asked):
            self._pauses.pop(player, None)
        else:
            known, longest = self._pauses.get(player), player.group["refresh_every"] - 1
            self._pauses[player] = Pause(why) if known is None else known.again(why, longest)
        return None if verdict == Verdict.FINE else why

    @property
    def pausing(self) -> bool:
        """Is there anybody whose calls are looked at again after a while?"""
        return bool(self._pauses)

    def _pausing(self, player: Player) -> bool:
        return player in self._pauses and self._pauses[player].left > 0

    def _probe(self, tape: Tape) -> None:
        for this in tape.passes:
            mine = [r for r in tape.records if r.origin is this and (0 in r.h or r.tallies)]
            key = (this.batch, *((r.name, r.has_rows()) for r in mine))
            if key not in self._mixed:
                self._mixed[key] = mixed_layers(tape, this)
            this.mixed = frozenset(name for name, _ in self._mixed[key])
            this.mixed_inputs = with_mixed_input(self._mixed[key])

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

    def shared(self, players: Iterable[Player]) -> None:
        """Layers of a field that several hosts run: what one of them tells is not all that the layer saw."""
        layers: dict[tuple[str, ...], list[str]] = {}
        for player in players:
            if player.torn:
                layers.setdefault(player.hosts, []).append(player.name.rpartition(".")[0])
        for runners, names in layers.items():
            why = f"several modules run them, {' and '.join(runners)}"
            self._warn(", ".join(dict.fromkeys(names)), why, "their curvature is adaptive")

    def say(self, name: str, why: str, effect: str) -> None:
        self.reasons[name] = why
        self._warn(name, why, effect)

    def _warn(self, name: str, why: str, effect: str) -> None:
        if (name, why) not in self._said:
            self._said.add((name, why))
            warnings.warn(f"{name}: {why}; {effect}", stacklevel=9)


def _verdict(calls: Calls, folded: Folded | None, player: Player, split: bool) -> Told:
    first = player.params[0]
    if folded is not None and first in folded.whole:
        return Verdict.UNUSABLE, folded.whole[first]
    if folded is not None and first in folded.columns and not calls.records(player):
        return Verdict.FINE, None
    if not calls.looked_at(player):
        return Verdict.NOT_TOLD, None
    if player.why_no_adapter() is None and not calls.records(player):
        return Verdict.ABSENT, _ABSENT
    why = calls.why_unusable(player, split)
    return (Verdict.FINE, None) if why is None else (Verdict.UNUSABLE, why)

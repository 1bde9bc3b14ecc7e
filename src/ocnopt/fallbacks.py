"""Layers whose calls cannot be read as the configuration asks. What stands in is said once, by name, never silently."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ocnopt import hosts
from ocnopt.capture import Tape
from ocnopt.curvature import BY_NAME
from ocnopt.forms import Calls
from ocnopt.players import Player
from ocnopt.probe import mixed_layers


class Fallbacks:
    """Found anew at each step: an odd step leaves no trace in the steps after it."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}  # of the last step, by name of player
        self._mixed: dict[tuple[Any, ...], frozenset[str]] = {}
        self._said: set[tuple[str, str]] = set()
        self._demoted: dict[int, tuple[Player, Player]] = {}
        self._last: dict[Player, str | None] = {}  # what the last look at the calls of a player told

    def players(
        self, tape: Tape, players: Sequence[Player], split: bool, state: Mapping[Tensor, dict[str, Any]]
    ) -> list[Player]:
        """The players of this step: with adaptive curvature where the calls that theirs reads are of no use."""
        if not (split or any(p.curvature.needs_model for p in players)):
            return list(players)
        self._probe(tape)

        def due(player: Player) -> bool:
            mine = state.get(player.params[0], {})
            return self._last.get(player) is None and player.curvature.due(mine, player.group, player.inside)

        failed = hosts.ask(tape.records, players, split, due)
        nobody = not (tape.records or split or any(map(due, players)))  # the hooks had nothing to keep
        calls = None if nobody else Calls(tape.records)
        return [self._checked(player, self._why(player, calls, failed, state), split) for player in players]

    def _why(
        self, player: Player, calls: Calls | None, failed: Mapping[str, str], state: Mapping[Tensor, dict[str, Any]]
    ) -> str | None:
        """Why the calls of a player are of no use. Between two looks, the last one stands."""
        if calls is not None and calls.looked_at(player):
            self._last[player] = calls.why_unusable(player)
            return self._last[player]
        if player.curvature.ready(state.get(player.params[0], {})) or self._last.get(player) is not None:
            return self._last.get(player)
        return next((failed[name] for name in player.module_names if name in failed), "its calls were not seen")

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
                self.say(player.name, "its calls were not seen", "it acts before the network runs again")

    def say(self, name: str, why: str, effect: str) -> None:
        self.reasons[name] = why
        if (name, why) not in self._said:
            self._said.add((name, why))
            warnings.warn(f"{name}: {why}; {effect}", stacklevel=8)

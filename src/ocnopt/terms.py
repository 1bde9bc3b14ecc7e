"""The terms of the game: the hyper-parameters of all groups, and what follows from them alone.

They are read at every step, and worked out again only where one of them has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import is_, itemgetter
from typing import Any

from ocnopt import arguments
from ocnopt.curvature import BY_NAME, Identity
from ocnopt.fused.support import are_wanted
from ocnopt.games.alignment import Alignment, rules_of
from ocnopt.players import resolve
from ocnopt.records import Need

_values = itemgetter(*(name for name in arguments.NAMES if name != "lr"))  # which schedulers change at every step


def _same(a: Any, b: Any) -> bool:
    """Some write the same number into the groups at each step."""
    return a is b or (type(a) is type(b) is float and a == b)


class Terms:
    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self.groups = list(groups)
        self._known = [_values(group) for group in groups]
        # a dict can be changed without being replaced
        self._lasting = not any(isinstance(group["alignment"], Mapping) for group in groups)
        self._checked = False
        self._needs: dict[tuple[bool, bool, bool], Need] = {}

    def hold(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Are these the same groups, with the same values but for the step size?"""
        same = self._lasting and len(groups) == len(self.groups) and all(map(is_, groups, self.groups))
        return same and all(all(map(_same, _values(g), known)) for g, known in zip(groups, self._known, strict=True))

    def check(self) -> None:
        """Raise ``ValueError`` for what is not allowed."""
        for group in self.groups:
            (arguments.check_lr if self._checked else arguments.check)(group)
        if not self._checked:
            arguments.check_agreement(self.groups)
        self._checked = True

    @property
    def whole(self) -> dict[str, Any]:
        """A group: they agree on what describes the game."""
        return self.groups[0]

    @property
    def playing(self) -> bool:
        return bool(self.whole["feedback"] != "off")

    @cached_property
    def rank(self) -> int | str:
        """In how many groups the samples of a step are."""
        rank: int | str = self.whole["rank"] if self.playing else 1
        return rank

    @cached_property
    def rules(self) -> dict[str, Alignment]:
        return rules_of(self.whole["alignment"]) or {}

    @cached_property
    def reads_layers(self) -> bool:
        """Does any curvature read what layers see?"""
        return any(resolve(group["curvature"]).needs_model for group in self.groups)

    @cached_property
    def always_looks(self) -> bool:
        return all(group["factor_every"] == 1 for group in self.groups)

    @cached_property
    def why_model(self) -> str | None:
        return next((why for group in self.groups if (why := arguments.why_model(group)) is not None), None)

    @cached_property
    def together(self) -> list[tuple[dict[str, Any], str]]:
        """The groups that need more than ``p.grad`` of processes that train one network, and why."""
        return [(group, why) for group in self.groups if (why := arguments.why_together(group)) is not None]

    @cached_property
    def runs_code_of_others(self) -> bool:
        """Does code of others run in the middle of a step: the model, or a curvature of somebody's own?"""
        own = all(resolve(group["curvature"]).name in BY_NAME for group in self.groups)
        return bool(self.whole["feedback"] == "nonlinear") or not own

    def need(self, due: bool, early: bool, accumulated: bool) -> Need:
        """What the hooks are to keep. ``due``: does a curvature that reads layers want to look at them? ``early``: may
        gradients be split into groups before the step? ``accumulated``: is the network known to be one that cannot run
        stage by stage?
        """
        key = due, early, accumulated
        if key not in self._needs:
            whole, playing = self.whole, self.playing
            self._needs[key] = Need(
                flow=playing and (whole["bellman"] == "paper" or whole["game"] == "noncooperative"),
                calls=due or (playing and whole["rank"] != 1),
                states=whole["feedback"] == "nonlinear",
                split=whole["rank"] != 1,
                whole=accumulated or whole["state"] == "accumulated",
                # with others to come, nobody knows where the groups of a pass begin and end
                rank=whole["rank"] if playing and early and whole["accumulate"] == 1 else 1,
                gram=any(isinstance(resolve(group["curvature"]), Identity) for group in self.groups),
                fused=all(map(are_wanted, self.groups)),
            )
        return self._needs[key]

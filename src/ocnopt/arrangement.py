"""Who acts when in a step: which forward pass it is about, the stages, and whether the network can run by them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ocnopt.capture import Tape
from ocnopt.games.alignment import Aligner, rules_of
from ocnopt.games.flow import Flow
from ocnopt.games.game import Game, Round
from ocnopt.games.live import Live
from ocnopt.games.replay import verify
from ocnopt.groups import Groups
from ocnopt.players import Player
from ocnopt.records import Need, Pass
from ocnopt.stages import Stages


def pass_of(tape: Tape, group: Mapping[str, Any]) -> Pass | None:
    """The forward pass of this step, where the configuration plays on single samples or runs it again."""
    nonlinear = group["feedback"] == "nonlinear"
    if group["feedback"] == "off" or (group["rank"] == 1 and not nonlinear):
        return None
    what = "feedback='nonlinear'" if nonlinear else f"rank={group['rank']!r}"
    passes = tape.passes
    if len(passes) > 1:
        raise RuntimeError(
            f"{what} needs exactly one forward pass of the attached model in each step, but {len(passes)} calls "
            f"contributed to the gradients; call zero_grad() between steps, or use feedback='linear' with rank=1"
        )
    if not passes or passes[0].batch is None:
        raise RuntimeError(
            f"{what} needs a forward and backward pass of the attached model itself since it was asked for and "
            f"since the last step; none was seen"
        )
    if nonlinear and passes[0].environment is None:
        raise RuntimeError(f"{what} was asked for after the forward pass: run forward and backward again")
    if nonlinear and passes[0].inputs_changed():
        raise RuntimeError(f"{what} runs the model again, but its input was changed in place since the forward pass")
    return passes[0]


class Arrangement:
    """The stages of the last step, and the game that they come from."""

    def __init__(self, model: nn.Module | None = None, aligner: Aligner | None = None) -> None:
        self.model, self.game = model, Game(model, aligner)
        self.stages: Stages | None = None
        self._key: Any = None
        # where no call is recorded, the order of definition stands in
        self._defined = None if model is None else [name for name, _ in model.named_modules()]

    def arrange(
        self,
        players: list[Player],
        this: Pass | None,
        groups: Groups,
        group: Mapping[str, Any],
        need: Need,
        tape: Tape | None,
    ) -> tuple[Stages, Live | None]:
        """Seat the players. Where the network is going to run again stage by stage, what that needs comes too."""
        self.game.why_accumulated = None
        order = self._defined if tape is None or not tape.order else tape.order
        order = order if this is None else this.order
        flow = None if tape is None else (this or tape).flow
        if tape is None or group["feedback"] == "off" or not (need.flow or need.states):
            return self._seated(players, order, None), None
        if this is not None and this.chain:  # the stages are the layers, in their order
            if flow is not None:
                self._placed(flow, group)
            return self._seated(players, order, None), None
        placed, why = self._placed(flow, group)
        live = None
        if placed is not None and this is not None and need.states:
            live, why = self._live(placed, this, groups, group["state"], tape)
        if why is not None:
            if this is None or this.fixed is None:  # that is over with the next step
                self._must_not_matter(group, why)
            self.game.why_accumulated = why
        return self._seated(players, order, None if why is not None else placed), live

    def _placed(self, flow: Flow | None, group: Mapping[str, Any]) -> tuple[Round | None, str | None]:
        rules = rules_of(group["alignment"])
        assert rules is not None
        if flow is None or flow.unknown is not None:
            return None, "its data flow was not seen" if flow is None else flow.unknown
        return self.game.arrange(flow, rules), None

    @staticmethod
    def _live(placed: Round, this: Pass, groups: Groups, state: str, tape: Tape) -> tuple[Live | None, str | None]:
        """The rollout over the data flow of this pass, or why it must be the accumulated one."""
        flow = placed.flow
        if state == "accumulated":
            return None, "state='accumulated'"
        if this.fixed or flow.why_fixed:
            return None, this.fixed or flow.why_fixed
        try:
            verify(flow, tape, this)
            live = None if flow.fixed else Live(flow, placed.placement, placed.edges, tape, this)
        except Exception as error:  # whatever its operations object to, the step goes on
            live, flow.fixed = None, f"its operations cannot be run again ({error})"
        why = flow.fixed if live is None else live.why_not(groups)
        return (live, None) if why is None else (None, why)

    @staticmethod
    def _must_not_matter(group: Mapping[str, Any], why: str) -> None:
        if rules_of(group["alignment"]) != rules_of("first"):
            raise RuntimeError(
                f"alignment={group['alignment']!r} needs a network that can run stage by stage, and this one cannot: "
                f"{why}"
            )

    def _seated(self, players: list[Player], order: list[str] | None, placed: Round | None) -> Stages:
        key = (tuple(players), None if order is None else tuple(order), placed)
        if self.stages is None or self._key != key:
            if placed is None or self.model is None:
                self.stages = Stages.in_order(players, order)
            else:
                self.stages = Stages.placed(players, placed.placement, self.model)
            self._key = key
        return self.stages

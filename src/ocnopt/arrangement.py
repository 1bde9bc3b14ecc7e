"""Who acts when in a step: which forward pass it is about, the stages, and whether the network can run by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ocnopt.capture import Tape
from ocnopt.distributed import World
from ocnopt.games.alignment import Aligner, rules_of
from ocnopt.games.flow import Flow
from ocnopt.games.game import Game, Round
from ocnopt.games.live import Live
from ocnopt.games.replay import Disagreement
from ocnopt.groups import Part, Samples
from ocnopt.phases import ROLLOUT
from ocnopt.players import Player, find_uses
from ocnopt.records import Need, Pass
from ocnopt.stages import Stages


def passes_of(tape: Tape, group: Mapping[str, Any]) -> list[Pass]:
    """The forward passes of this step, where the configuration plays on single samples or runs them again."""
    nonlinear = group["feedback"] == "nonlinear"
    if group["feedback"] == "off" or (group["rank"] == 1 and not nonlinear):
        return []
    what = "feedback='nonlinear'" if nonlinear else f"rank={group['rank']!r}"
    passes = sorted(tape.passes, key=lambda this: this.turn)
    if tape.folded is None and all(this.batch is None for this in passes):
        raise RuntimeError(
            f"{what} needs a forward and backward pass of the attached model itself since it was asked for and "
            f"since the last step; none was seen (attach the model before torch.compile, or at least before the "
            f"compiled model first runs)"
        )
    alone = next((record.name for record in tape.records if record.origin.batch is None), None)
    if alone is not None:
        raise RuntimeError(
            f"{what} needs forward passes of the attached model itself, but {alone!r} was also called alone"
        )
    if nonlinear and any(this.environment is None for this in passes):
        raise RuntimeError(f"{what} was asked for after the forward pass: run forward and backward again")
    if nonlinear and group["rank"] != 1 and not all(this.split for this in passes):
        raise RuntimeError(
            f"rank={group['rank']!r} was asked for after the forward pass: run forward and backward again"
        )
    if nonlinear and any(this.inputs_changed() for this in passes):
        raise RuntimeError(f"{what} runs the model again, but its input was changed in place since the forward pass")
    return passes


def _defined(model: nn.Module) -> list[str]:
    """The modules that are watched, in the order of their definition."""
    watched = {use.module_name for uses in find_uses(model).values() for use in uses}
    return [name for name, _ in model.named_modules() if name in watched]


class Arrangement:
    """The stages of the last step, and the game that they come from."""

    def __init__(self, model: nn.Module | None = None, aligner: Aligner | None = None) -> None:
        self.model, self.game = model, Game(model, aligner)
        self.stages: Stages | None = None
        self._key: Any = None
        # where no call is recorded, the order of definition stands in
        self._defined = None if model is None else _defined(model)

    def arrange(
        self,
        players: list[Player],
        passes: Sequence[Pass],
        samples: Samples,
        group: Mapping[str, Any],
        need: Need,
        tape: Tape | None,
        world: World,
    ) -> tuple[Stages, list[Live]]:
        """Seat the players. Where the network is going to run again stage by stage, what that needs comes too."""
        self.game.why_accumulated = None
        this = passes[0] if passes else None
        if tape is not None and tape.folded is not None:  # the first pass of the step is no longer on the tape
            this = tape.folded.first
        order = self._defined if tape is None or not tape.order else tape.order
        order = order if this is None else this.order
        flow = None if tape is None else (this or tape).flow
        if tape is None or group["feedback"] == "off" or not (need.flow or need.states):
            return self._seated(players, order, None), []
        chain = this is not None and this.chain and len(passes) == 1
        if need.states and world.every(chain):  # the stages are the layers, in their order
            stages = self._seated(players, order, None)
            if flow is not None:
                self._placed(flow, group)
                flow.asking = frozenset(stages.modules[seats[0]] for seats in stages.seats)
            return stages, []
        placed, why = self._placed(flow, group)
        live: list[Live] = []
        if placed is not None and passes and need.states:
            live, why = self._all_live(placed, players, passes, samples, group, tape)
        if need.states and not world.every(why is None):
            live, why = [], why or "that is so on another process"
        if why is not None:
            if len(passes) > 1 and need.states:
                raise RuntimeError(
                    f"feedback='nonlinear' over {len(passes)} forward passes needs a network that can run stage by "
                    f"stage, and this one cannot: {why}; make one pass a step, or use feedback='linear'"
                )
            if this is None or this.fixed is None:  # that is over with the next step
                self._must_not_matter(group, why)
            self.game.why_accumulated = why
        return self._seated(players, order, None if why is not None else placed), live

    @ROLLOUT
    def _all_live(
        self,
        placed: Round,
        players: list[Player],
        passes: Sequence[Pass],
        samples: Samples,
        group: Mapping[str, Any],
        tape: Tape,
    ) -> tuple[list[Live], str | None]:
        """The rollout over the data flows of the passes, or why it must be the accumulated one."""
        lives, state = [], group["state"]
        static = not any(rule.rule in ("random", "adaptive") for rule in (rules_of(group["alignment"]) or {}).values())
        for this in passes:
            flow = this.flow
            if flow is None or flow.unknown is not None:
                return [], "its data flow was not seen" if flow is None else flow.unknown
            mine = placed if flow is placed.flow else self.game.place(flow, placed.late)
            if mine is not placed and self._stages(players, mine) != self._stages(players, placed):
                return [], "its passes go through it in different ways"
            live, why = self._live(mine, this, samples.of(this), state, tape)
            edges = mine.edges if static else mine.anywhere
            flow.watched = None if live is None or edges.hidden or this.opaque else edges
            if live is None:
                return [], why
            lives.append(live)
        return lives, None

    def _placed(self, flow: Flow | None, group: Mapping[str, Any]) -> tuple[Round | None, str | None]:
        rules = rules_of(group["alignment"])
        assert rules is not None
        if flow is None or flow.unknown is not None:
            return None, "its data flow was not seen" if flow is None else flow.unknown
        return self.game.arrange(flow, rules), None

    @staticmethod
    def _live(placed: Round, this: Pass, part: Part, state: str, tape: Tape) -> tuple[Live | None, str | None]:
        flow = placed.flow
        if state == "accumulated":
            return None, "state='accumulated'"
        if this.fixed or flow.why_fixed:
            return None, this.fixed or flow.why_fixed
        if this.outputs_changed():
            return None, "an output of the model was overwritten in place after the pass"
        try:
            live = None if flow.fixed else Live(placed, tape, this, part)
            flow.uses += live is None or live.done
        except Disagreement as error:
            live, flow.fixed = None, str(error)
        except Exception as error:  # whatever its operations object to, the step goes on
            live, flow.fixed = None, f"its operations cannot be run again ({error})"
        why = flow.fixed if live is None else live.why_not(part)
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
            joining = self.game.joining
            self.stages = Stages.in_order(players, order, joining) if placed is None else self._stages(players, placed)
            self._key = key
        return self.stages

    def _stages(self, players: list[Player], placed: Round) -> Stages:
        assert self.model is not None
        return Stages.placed(players, placed.placement, self.model)

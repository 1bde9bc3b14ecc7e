"""A layer with Kronecker curvature: its metric, and what it keeps from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ocnopt import whole_step
from ocnopt.curvature import beside
from ocnopt.curvature.eigen import Inverse, inputs_seen
from ocnopt.curvature.inputs import Number, Seen
from ocnopt.curvature.tally import shape
from ocnopt.curvature.turns import caught_up, interval, period, stagger
from ocnopt.distributed import World
from ocnopt.layers.base import Adapter

if TYPE_CHECKING:
    from ocnopt.players import Player

#: what a layer keeps from step to step
_STATE = (
    "input_factor", "output_factor", "statistics", "since_refresh", "refreshed_at", "basis_at", "early",
    "input_basis", "output_basis", "eigenvalues", "next_input_factor", "next_output_factor",
)  # fmt: skip
BASES = ("input_basis", "output_basis")
#: the factors as they were, while a basis of them is made
ASIDE = ("next_input_factor", "next_output_factor")


@dataclass
class KroneckerBlock:
    """C of one layer."""

    module: nn.Module
    adapter: Adapter
    names: tuple[str, ...]
    inverse: Inverse

    def solve(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        V = self.adapter.to_matrix(self.module, dict(zip(self.names, tensors, strict=True)))
        back = self.adapter.from_matrix(self.module, self.inverse(V))
        return [back[n] for n in self.names]


@dataclass(eq=False)
class Layer:
    """A player in one step, and what it keeps from step to step."""

    player: Player
    state: dict[str, Any]
    passes: list[Seen] = field(default_factory=list)  # what this process saw of it
    samples: Number = 0.0  # how many all processes saw
    ok: Tensor = field(init=False)  # does this step tell something about it?
    weight: Tensor = field(init=False)  # of this step in the averages

    @property
    def factors(self) -> tuple[Tensor, Tensor]:
        return self.state["input_factor"], self.state["output_factor"]

    @property
    def bases(self) -> tuple[Tensor, Tensor]:
        return self.state["input_basis"], self.state["output_basis"]

    def block(self, damping: float) -> KroneckerBlock:
        player = self.player
        assert player.adapter is not None
        assert player.module is not None
        inverse = Inverse(self.state["eigenvalues"], *self.bases, damping, self.inputs_seen())
        return KroneckerBlock(player.module, player.adapter, player.own_names, inverse)

    def inputs_seen(self) -> Tensor | None:
        return inputs_seen(self.state["input_factor"], self.state["eigenvalues"], self.state["input_basis"])

    def begin(self, like: Tensor) -> None:
        """Make room for the factors, also where this process has not seen a sample."""
        adapter, module = self.player.adapter, self.player.module
        assert adapter is not None
        assert module is not None
        if "input_factor" in self.state:
            return
        g, c, a = shape(adapter, module)
        self.state["input_factor"], self.state["output_factor"] = like.new_zeros(g, a, a), like.new_zeros(g, c, c)
        self.state["statistics"] = like.new_zeros(())  # how many are in the factors
        self.state["since_refresh"] = 0

    def forget(self) -> None:
        for key in _STATE:
            self.state.pop(key, None)

    def rehearse(self, like: Tensor) -> None:
        """State without any statistics: the first look at the layer finds all of it out of date."""
        self.begin(like)
        self.keep_on()
        start = -self.state["since_refresh"]
        self.state.update(refreshed_at=start, basis_at=start, early=0)

    @property
    def _every(self) -> int:
        return interval(self.state, self.player.group, self.player.inside)

    def has_learned(self) -> bool:
        """How many of the steps since the last refresh have counted? Only the device knows."""
        if "input_basis" not in self.state:
            return True
        found = caught_up(self.state, self.player.group, self.player.inside)
        if "refreshed_at" in found:
            return True
        self.state.update(found)
        return False

    def average(self, average: Tensor, value: Tensor, share: Number) -> None:
        """Go on with a running average of value · share; a value of a bad step may be anything."""
        if not whole_step.may_look(self.ok):
            average.lerp_(torch.where(self.ok, value * share, average), self.weight)
        elif bool(self.ok):  # and nothing of this size is written down
            weight = float(self.weight)
            average.mul_(1 - weight).add_(value, alpha=weight * float(share))

    def renew(self, **found: Tensor) -> None:
        """In place: a CUDA graph goes on with the new basis."""
        for key, value in found.items():
            if key in self.state:
                self.state[key].copy_(value)
            else:
                self.state[key] = value

    def set_aside(self, peers: Sequence[Player], world: World) -> None:
        """A basis of the factors as they are now is to be made: by now, or shared out when its time comes."""
        self.state.setdefault("basis_at", self.state["refreshed_at"])
        self.state.update(zip(ASIDE, [factor.clone() for factor in self.factors], strict=True))
        self.rest(peers)
        if world.size == 1:
            beside.begin(self.aside)

    @property
    def aside(self) -> tuple[Tensor, Tensor]:
        """Some ways to keep state lose what comes and goes; then it is a basis of the factors as they are."""
        return self.factors if ASIDE[0] not in self.state else (self.state[ASIDE[0]], self.state[ASIDE[1]])

    def serve(self, made: bool) -> None:
        """It was made, and is in its place; or it failed, and another one is begun."""
        for key in ASIDE:
            self.state.pop(key, None)
        if made:
            self.state["basis_at"] = self.state["refreshed_at"]
        else:
            every = period(self.player.group, self.player.inside)
            self.state.update(refreshed_at=self.state["basis_at"], early=every, since_refresh=1)

    def rest(self, peers: Sequence[Player]) -> None:
        """There is a new basis. One that would last comes early to an end if its layer is refreshed at another time
        than its turn: each has one of its own, so that the refreshes of a network are spread over the steps.
        """
        state, group, inside = self.state, self.player.group, self.player.inside
        state.update(refreshed_at=int(state["statistics"]), since_refresh=0, early=0)
        every, unit = period(group, inside), group["factor_every"]
        if inside or len(peers) < 2 or every == unit or interval(state, group, inside) < every:
            return
        turns = stagger([_cost(peer) for peer in peers], every, unit)
        turn = turns[[peer is self.player for peer in peers].index(True)]
        state["early"] = (state["refreshed_at"] - 1 - turn) % every // unit * unit  # the first of all is at step 1

    def keep_on(self) -> None:
        """There is no new basis: the old one stays, and the next step tries again."""
        self.state["since_refresh"] = self._every
        if "input_basis" in self.state:
            return
        # nothing to keep: the diagonals of the factors, in coordinates as they are
        self.state["input_basis"], self.state["output_basis"] = map(_eye, self.factors)
        d, c = (v.diagonal(dim1=1, dim2=2).nan_to_num(0.0, 0.0, 0.0).clamp_min(0) for v in self.factors)
        self.state["eigenvalues"] = c[:, :, None] * d[:, None, :]


def _cost(player: Player) -> float:
    """Of decomposing both factors: n³, of the weight as a matrix."""
    weight = player.params[0]
    c = weight.shape[0]
    return float(c**3 + (weight.numel() // max(1, c)) ** 3)


def _eye(factor: Tensor) -> Tensor:
    return torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand_as(factor).clone()

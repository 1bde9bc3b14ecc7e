"""Players that share hyper-parameters, metric, device and dtype: whatever is done to them is one multi-tensor
operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ocnopt.curvature import Metric
from ocnopt.curvature.tally import Tally
from ocnopt.distributed import World
from ocnopt.gradients import GroupGradients
from ocnopt.groups import Part
from ocnopt.layers.base import Call
from ocnopt.moment import Moment
from ocnopt.multi import copied
from ocnopt.phases import CURVATURE
from ocnopt.players import Player
from ocnopt.shards import parts
from ocnopt.shelves import Shelf

Scalar = float | Tensor


@dataclass
class Bucket:
    """One slice of the problem of one step. Lists run over the parameters of ``players``, one after another."""

    shelf: Shelf
    gradients: GroupGradients
    calls: Mapping[int, list[tuple[Part, list[Call]]]]  # id(player) → forward passes → calls of its module
    tallies: Mapping[int, list[Tally]]  # id(player) → forward passes whose calls have been added up
    seen: Set[int]  # ids of the players of which any process has calls
    moment: Moment  # when it is
    ok: Tensor  # 1, or 0 if this step must leave no trace
    world: World = field(default_factory=World)  # the processes that share the batch
    failed_refreshes: int = field(default=0)
    metric: Metric | None = field(default=None)
    preconditioned: GroupGradients | None = field(default=None)  # C^{-1} G
    stride: Tensor | None = field(default=None)  # what directions are multiplied by: η, or 0 in a step without a trace
    pending: list[Tensor] | None = field(default=None)  # what is planned to be taken off parameters of few digits
    coasted: list[Tensor] | None = field(default=None)  # the momentum to come, where it depends on the parameters
    steered: list[tuple[list[int], Tensor]] = field(default_factory=list)  # which parameters, and with which weights

    @property
    def group(self) -> dict[str, Any]:
        return self.shelf.group

    @property
    def players(self) -> list[Player]:
        return self.shelf.players

    @property
    def peers(self) -> Sequence[Player]:
        """All players of the step that have this curvature."""
        return self.shelf.peers

    @property
    def params(self) -> list[Tensor]:
        return self.shelf.params

    @property
    def states(self) -> list[dict[str, Any]]:
        return self.shelf.states

    @CURVATURE
    def measure(self, a: Tensor | None) -> None:
        """Let the curvature learn from this step, see :meth:`Curvature.measure`."""
        self.metric = self.shelf.curvature.measure(self, a)

    @cached_property
    def lr(self) -> Scalar:
        lr: Scalar = self.group["lr"]
        return lr.clone().reshape(()) if isinstance(lr, Tensor) else lr  # a scheduler changes it in place

    def state_of(self, player: int) -> dict[str, Any]:
        """Where a player keeps what is joint to its parameters: the state of its first one."""
        first = sum(len(p.params) for p in self.players[:player])
        return self.states[first]

    def zeros_like_parameters(self, key: str) -> list[Tensor]:
        """State tensors of that name, created when they do not exist yet, never in less than float32.

        Of a parameter in parts, this process gets its own, as of gradients; the state has the shape of the parameter.
        """
        if not all(key in state for state in self.states):
            for state, p in zip(self.states, self.params, strict=True):
                if key not in state:
                    state[key] = torch.zeros_like(p, dtype=self.ok.dtype, memory_format=torch.preserve_format)
        return parts(state[key] for state in self.states)

    def force(self, a: Tensor | None) -> list[Tensor]:
        """Q_θ = G a + γθ (a = 1 in consistent mode): the gradient of the Bellman objective.

        One of N fictitious players holds θ/N, and with it its share of the decay. Zero in a step without a trace.
        """
        q = self.gradients.total() if a is None else self.gradients.mix(a)
        if self._has_decay:
            q = list(torch._foreach_add(q, torch._foreach_mul(self._decayed(), self.ok), alpha=1 / self.fictitious))
        return q

    def _with_decay(self, q: list[Tensor]) -> list[Tensor]:
        return list(torch._foreach_add(q, self._decayed())) if self._has_decay else q

    @property
    def fictitious(self) -> int:
        """N of eq. (robust-traj): θ is the sum of N players with a metric each, which cooperate. They have the same
        gradient, so they take the same step: N kernels, N steps, and the linear cost shared out among them.
        """
        N: int = self.group["players"]
        return N

    @cached_property
    def _decays(self) -> list[float]:
        return [group["weight_decay"] for player in self.players for group in player.groups]

    def _decayed(self) -> list[Tensor]:
        """γθ."""
        return list(torch._foreach_mul([p.to(self.ok.dtype) for p in parts(self.params)], self._decays))

    # --- the table of math section 3: a momentum step is a DDP step in the long-run metric, a fraction φ at a time ---

    @property
    def gain(self) -> float:
        """M^{-1} = gain · C^{-1} · η: 1/(1−μ) for heavy ball and Nesterov."""
        return 1.0 if self.group["ema"] else 1 / (1 - self.group["momentum"])

    @property
    def fraction(self) -> tuple[float, Scalar]:
        """φ, the part of the planned step that is taken now, as a quotient."""
        mu: float = self.group["momentum"]
        if self.group["ema"]:
            return 1 - mu, self._momentum_correction
        return 1 - mu**2 if self.group["nesterov"] else 1 - mu, 1.0

    @property
    def _momentum_correction(self) -> Scalar:
        averaged = self.group["ema"] and self.group["bias_correction"]
        return self.moment.weight_of_average(self.group["momentum"]) if averaged else 1.0

    def linear_cost(self) -> tuple[list[Tensor], float] | None:
        """ℓ = γθ + (what is left of the momentum): vectors and what they are to be multiplied by, or ``None`` if there
        is no ℓ.
        """
        mu = self.group["momentum"]
        if not mu:
            return (self._decayed(), 1.0) if self._has_decay else None
        scale = mu / (1 - mu) if self.group["ema"] else mu**2 / (1 + mu) if self.group["nesterov"] else mu
        m = self.zeros_like_parameters("momentum")
        if not self._has_decay:
            return m, scale
        return list(torch._foreach_add(self._decayed(), m, alpha=scale)), 1.0

    def decoupled_drift(self) -> Tensor | None:
        """G^T γθ, ``[rows, r]``, of a decoupled weight decay."""
        if not self.group["decoupled_weight_decay"] or not any(self._decays):
            return None
        return self.gradients.project(self._decayed())

    # --- acting ---

    def apply(self, w: Tensor) -> None:
        """θ ← θ − φ M^{-1} (N G w + ℓ), and the momentum goes on. All at once, for one w."""
        self.preconditioned, N = None, self.fictitious
        m, ahead = self.zeros_like_parameters("momentum") if self.group["momentum"] else None, self._looks_ahead
        if m is not None:
            self._coast(m)
            (self.gradients.add_to if ahead else self.gradients.give_to)(m, w, N * self._intake)
        if m is not None and not ahead:
            change = self._planned(m, own=False)
        else:
            direction = self._with_decay(self.gradients.mix(N * w))
            if m is not None:
                torch._foreach_add_(direction, m, alpha=self.group["momentum"])
            change = self._planned(direction, own=True)
        torch._foreach_sub_(parts(self.params), change)

    def coast(self) -> None:
        """The part of :meth:`apply` that the policy has no say in, momentum and decay: for all layers at once, before
        the first one acts. Nobody looks at a layer before it does.

        The momentum stays as it is until :meth:`settle`, so that there is nothing to put back if a second pass fails.
        """
        m, mu = None, self.group["momentum"]
        if mu:
            m = copied(self.zeros_like_parameters("momentum"))
            self._coast(m)
            self.coasted = m if self._has_decay else None  # the parameters are about to move
        direction = m
        if m is None or self._looks_ahead:
            direction = self._decayed() if self._has_decay else None
        if m is not None and self._looks_ahead:
            drift = list(torch._foreach_mul(m, mu))
            direction = drift if direction is None else list(torch._foreach_add(direction, drift))
        change = self._planned(direction, own=direction is not self.coasted)
        if self._few_digits:
            self.pending = change
        else:
            torch._foreach_sub_(parts(self.params), change)

    def steer(self, seats: Sequence[int], w: Tensor) -> None:
        """The part that it has: of the layers that act now."""
        selected = self.shelf.select(seats)
        if selected is None:
            return
        assert self.preconditioned is not None
        assert self.stride is not None
        few, index = selected
        mu, theirs = self.group["momentum"], parts(few.params)
        taken = self.fictitious * (self._intake if mu and not self._looks_ahead else 1 + mu)
        gradients = self.preconditioned.select(index)
        if self.pending is None:
            gradients.add_to(theirs, w, -taken, self.stride)
        else:
            change = [self.pending[i] for i in index]
            gradients.add_to(change, w, taken, self.stride)
            torch._foreach_sub_(theirs, change)
        self.steered.append((index, w))

    def settle(self) -> None:
        """All have acted: the momentum goes on."""
        self.pending = self.preconditioned = None
        if not self.group["momentum"]:
            return
        m = self.zeros_like_parameters("momentum")
        if self.coasted is None:
            self._coast(m)
        else:
            torch._foreach_copy_(m, self.coasted)
        self.gradients.add_each(m, self.steered, self.fictitious * self._intake)

    @property
    def _few_digits(self) -> bool:
        """Are the parameters of lower precision than the arithmetic? Then they are moved once in a step."""
        return self.params[0].dtype != self.ok.dtype

    @property
    def _looks_ahead(self) -> bool:
        return bool(self.group["momentum"] and self.group["nesterov"] and not self.group["ema"])

    @property
    def _has_decay(self) -> bool:
        return not self.group["decoupled_weight_decay"] and any(self._decays)

    @property
    def _intake(self) -> float:
        """The weight of a new direction in the momentum."""
        return 1 - self.group["momentum"] if self.group["ema"] else 1.0

    def _coast(self, m: list[Tensor]) -> None:
        """The momentum, one step later, if there were no gradient."""
        torch._foreach_mul_(m, torch.rsub(self.ok, 1, alpha=1 - self.group["momentum"]))
        if self._has_decay:
            torch._foreach_add_(m, torch._foreach_mul(self._decayed(), self.ok), alpha=self._intake)

    def _planned(self, direction: list[Tensor] | None, own: bool) -> list[Tensor]:
        """What a direction, and a decoupled decay, take off the parameters. ``own``: it may be overwritten."""
        assert self.metric is not None
        rate = self.ok * self.lr
        self.stride = rate / self._momentum_correction
        if direction is None:
            change = [torch.zeros_like(p, dtype=self.ok.dtype) for p in parts(self.params)]
        else:
            change = self.metric.solve(direction)
            if self.metric.is_new or (own and self.metric.is_identity):
                torch._foreach_mul_(change, self.stride)
            else:
                change = list(torch._foreach_mul(change, self.stride))
        if self.group["decoupled_weight_decay"] and any(self._decays):
            torch._foreach_add_(change, torch._foreach_mul(self._decayed(), rate))
        return change

    def select(self, seats: Sequence[int]) -> Bucket | None:
        """The players of some seats, or ``None``, as a bucket that nothing has been done to. Shares state with this."""
        selected = self.shelf.select(seats)
        if selected is None:
            return None
        few, index = selected
        return replace(self, shelf=few, gradients=self.gradients.select(index), steered=[])

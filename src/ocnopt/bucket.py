"""Players that share hyper-parameters, metric, device and dtype: whatever is done to them is one multi-tensor
operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ocnopt.curvature import Curvature, Metric
from ocnopt.distributed import World
from ocnopt.gradients import GroupGradients
from ocnopt.groups import Part
from ocnopt.layers.base import Call
from ocnopt.multi import ema_
from ocnopt.phases import CURVATURE
from ocnopt.players import Player
from ocnopt.shards import local

Scalar = float | Tensor


@dataclass
class Bucket:
    """One slice of the problem of one step. Lists run over the parameters of ``players``, one after another."""

    group: dict[str, Any]
    curvature: Curvature
    players: list[Player]
    params: list[Tensor]
    states: list[dict[str, Any]]
    seats: list[int]  # of each player
    gradients: GroupGradients
    calls: Mapping[int, list[tuple[Part, list[Call]]]]  # id(player) → forward passes → calls of its module
    seen: Set[int]  # ids of the players of which any process has calls
    clock: Tensor  # steps taken, this one not counted
    ok: Tensor  # 1, or 0 if this step must leave no trace
    world: World = field(default_factory=World)  # the processes that share the batch
    owners: World = field(default_factory=World)  # the processes that hold a part of each parameter
    failed_refreshes: int = field(default=0)
    metric: Metric | None = field(default=None)

    @CURVATURE
    def measure(self, a: Tensor | None) -> None:
        """Let the curvature learn from this step, see :meth:`Curvature.measure`."""
        self.metric = self.curvature.measure(self, a)

    @property
    def steps(self) -> Tensor:
        """Steps taken, this one counted; at least 1, so that bias corrections of a bad first step stay finite."""
        return (self.clock + 1).to(self.ok.dtype)

    @property
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
        for state, p in zip(self.states, self.params, strict=True):
            if key not in state:
                state[key] = torch.zeros_like(p, dtype=self.ok.dtype, memory_format=torch.preserve_format)
        return [local(state[key]) for state in self.states]

    def force(self, a: Tensor | None) -> list[Tensor]:
        """Q_θ = G a + γθ (a = 1 in consistent mode): the gradient of the Bellman objective.

        One of N fictitious players holds θ/N, and with it its share of the decay.
        """
        return self._with_decay(self.gradients.total() if a is None else self.gradients.mix(a), 1 / self.fictitious)

    def _with_decay(self, q: list[Tensor], share: float = 1.0) -> list[Tensor]:
        if not self.group["decoupled_weight_decay"] and any(self._decays):
            return list(torch._foreach_add(q, self._decayed(), alpha=share))
        return q

    @property
    def fictitious(self) -> int:
        """N of eq. (robust-traj): θ is the sum of N players with a metric each, which cooperate. They have the same
        gradient, so they take the same step: N kernels, N steps, and the linear cost shared out among them.
        """
        N: int = self.group["players"]
        return N

    @property
    def _decays(self) -> list[float]:
        return [group["weight_decay"] for player in self.players for group in player.groups]

    def _decayed(self) -> list[Tensor]:
        """γθ."""
        return list(torch._foreach_mul([local(p).detach().to(self.ok.dtype) for p in self.params], self._decays))

    # --- the table of math section 3: a momentum step is a DDP step in the long-run metric, a fraction φ at a time ---

    @property
    def gain(self) -> Scalar:
        """M^{-1} = gain · C^{-1} · η: 1/(1−μ) for heavy ball and Nesterov."""
        return 1.0 if self.group["ema"] else 1 / (1 - self.group["momentum"])

    @property
    def fraction(self) -> Scalar:
        """φ, the part of the planned step that is taken now."""
        mu: float = self.group["momentum"]
        if self.group["ema"]:
            return (1 - mu) / self._momentum_correction
        return 1 - mu**2 if self.group["nesterov"] else 1 - mu

    @property
    def _momentum_correction(self) -> Scalar:
        averaged = self.group["ema"] and self.group["bias_correction"]
        return self.weight_of_average(self.group["momentum"]) if averaged else 1.0

    def weight_of_average(self, mu: float) -> Scalar:
        """1 − μ^t, what an average that started at zero lacks; without loss of digits where μ is close to 1."""
        return -torch.expm1(self.steps * math.log(mu)) if mu else 1.0

    def linear_cost(self, preconditioned: GroupGradients) -> Tensor | None:
        """G^T C^{-1} ℓ, ``[rows, r]``, with ℓ = γθ + (what is left of the momentum), or ``None`` if there is no ℓ."""
        mu, terms = self.group["momentum"], []
        if mu:
            m = self.zeros_like_parameters("momentum")
            scale = mu / (1 - mu) if self.group["ema"] else mu**2 / (1 + mu) if self.group["nesterov"] else mu
            terms.append(scale * preconditioned.project(m))
        if not self.group["decoupled_weight_decay"] and any(self._decays):
            terms.append(preconditioned.project(self._decayed()))
        return torch.stack(terms).sum(0) if terms else None

    def decoupled_drift(self) -> Tensor | None:
        """G^T γθ, ``[rows, r]``, of a decoupled weight decay."""
        if not self.group["decoupled_weight_decay"] or not any(self._decays):
            return None
        return self.gradients.project(self._decayed())

    # --- acting ---

    def apply(self, w: Tensor) -> None:
        """θ ← θ − φ M^{-1} (N G w + ℓ), and the momentum goes on."""
        group, mu = self.group, self.group["momentum"]
        assert self.metric is not None
        direction = self._with_decay(self.gradients.mix(self.fictitious * w))
        if mu:
            direction = self._advance_momentum(direction)
        params = [local(p) for p in self.params]
        step = torch._foreach_mul(self.metric.solve(direction), self.ok * self.lr / self._momentum_correction)
        if group["decoupled_weight_decay"] and any(self._decays):
            torch._foreach_sub_(params, torch._foreach_mul(self._decayed(), self.ok * self.lr))
        torch._foreach_sub_(params, list(step))

    def _advance_momentum(self, d: list[Tensor]) -> list[Tensor]:
        mu, m = self.group["momentum"], self.zeros_like_parameters("momentum")
        if self.group["ema"]:
            ema_(m, d, (1 - mu) * self.ok)
            return m
        torch._foreach_mul_(m, 1 - (1 - mu) * self.ok)
        torch._foreach_add_(m, torch._foreach_mul(d, self.ok))
        if self.group["nesterov"]:
            torch._foreach_add_(d, m, alpha=mu)
            return d
        return m

    def select(self, seats: Sequence[int]) -> Bucket | None:
        """The players of some seats, or ``None``. Shares state with the whole."""
        chosen = [i for i, theirs in enumerate(self.seats) if theirs in seats]
        if not chosen:
            return None
        ends = list(accumulate((len(player.params) for player in self.players), initial=0))
        index = [j for i in chosen for j in range(ends[i], ends[i + 1])]
        return replace(
            self,
            players=[self.players[i] for i in chosen],
            params=[self.params[j] for j in index],
            states=[self.states[j] for j in index],
            seats=[self.seats[i] for i in chosen],
            gradients=self.gradients.select(index),
            metric=None if self.metric is None else self.metric.select(index),
        )

    def parameter_seats(self) -> list[int]:
        return [seat for seat, player in zip(self.seats, self.players, strict=True) for _ in player.params]

"""Players that share hyper-parameters, metric, device and dtype, and act together: what is joint to all ways of acting.

:class:`~ocnopt.bucket.Bucket` is the general one; :class:`~ocnopt.fused.actor.FusedActor` does the same in a few
kernels, where it can.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ocnopt import whole_step
from ocnopt.bellman import on_line
from ocnopt.moment import Moment
from ocnopt.players import Player
from ocnopt.shelves import Shelf

Scalar = float | Tensor


class Products(NamedTuple):
    """What the recursion needs of each parameter, in the metric C, before it is scaled."""

    K: Tensor  # [rows, r, r]: G^T C^{-1} G
    u: Tensor | None  # [rows, r]: G^T C^{-1} ℓ, what goes through the metric, divided by `share`
    free: Tensor | None  # [rows, r]: G^T γθ, of a decoupled decay
    share: float = 1.0


@dataclass
class Answer:
    """What the policy asks for, w of ``[r]``, and what is taken of it.

    Where w is a line in s, a kernel can work it out by itself.
    """

    start: Tensor
    clamp: bool  # keep it in [0, 1]
    slope: Tensor | None = None
    s: Tensor | None = None

    def worked_out(self) -> Tensor:
        """w = start + slope · s, before it is clamped."""
        if self.slope is None or self.s is None:
            return self.start
        return on_line(self.start, self.slope, self.s)

    @cached_property
    def w(self) -> Tensor:
        return bounded(self.worked_out(), self.clamp)

    def on(self, like: Tensor) -> Answer:
        """For players that are somewhere else."""
        if self.start.device == like.device and self.start.dtype == like.dtype:
            return self
        return Answer(self.worked_out().to(like), self.clamp)


def bounded(w: Tensor, clamp: bool) -> Tensor:
    w = torch.nan_to_num(w, 0.0, 0.0, 0.0)  # a kernel beyond all numbers: do not move
    return w.clamp(0, 1) if clamp else w


@dataclass
class Actor(ABC):
    """One slice of the problem of one step. Lists run over the parameters of ``players``, one after another."""

    shelf: Shelf
    moment: Moment  # when it is
    ok: Tensor  # 1, or 0 if this step must leave no trace

    failed_refreshes: int = field(default=0, kw_only=True)

    @property
    def settled_last(self) -> frozenset[str]:
        """State that stays as it is until :meth:`settle`, or longer."""
        return frozenset({"step", "momentum"})

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

    @cached_property
    def lr(self) -> Scalar:
        lr = whole_step.rate(self.group)
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
                    state[key] = torch.zeros_like(p, dtype=self.moment.dtype, memory_format=torch.preserve_format)
        return self.shelf.parts([state[key] for state in self.states])

    # --- the backward pass of dynamic programming ---

    @abstractmethod
    def measure(self, a: Tensor | None) -> None:
        """Let the curvature learn from this step, see :meth:`Curvature.measure`."""

    @abstractmethod
    def products(self) -> Products:
        """Kernels and linear costs, once the metric is measured."""

    # --- acting ---

    @abstractmethod
    def apply(self, answer: Answer) -> None:
        """θ ← θ − φ M^{-1} (N G w + ℓ), and the momentum goes on. All at once, with one answer."""

    @abstractmethod
    def coast(self) -> None:
        """Before the first layer acts, where they act one after another. The policy has no say yet."""

    @abstractmethod
    def steer(self, seats: Sequence[int], answer: Answer) -> None:
        """The layers of these seats act."""

    @abstractmethod
    def settle(self) -> None:
        """All have acted: what stays as it was until then, so that there is nothing to put back, goes on."""

    # --- the table of math section 3: a momentum step is a DDP step in the long-run metric, a fraction φ at a time ---

    @property
    def fictitious(self) -> int:
        """N of eq. (robust-traj): θ is the sum of N players with a metric each, which cooperate. They have the same
        gradient, so they take the same step: N kernels, N steps, and the linear cost shared out among them.
        """
        N: int = self.group["players"]
        return N

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

    @property
    def momentum_cost(self) -> float:
        """What is left of the momentum, ℓ − γθ, as a multiple of it."""
        mu: float = self.group["momentum"]
        return mu / (1 - mu) if self.group["ema"] else mu**2 / (1 + mu) if self.group["nesterov"] else mu

    @property
    def intake(self) -> float:
        """The weight of a new direction in the momentum."""
        return 1 - self.group["momentum"] if self.group["ema"] else 1.0

    @property
    def looks_ahead(self) -> bool:
        return bool(self.group["momentum"] and self.group["nesterov"] and not self.group["ema"])

    @cached_property
    def decays(self) -> list[float]:
        """γ of each parameter."""
        return [group["weight_decay"] for player in self.players for group in player.groups]

    @property
    def has_decay(self) -> bool:
        """Is γθ a part of the linear cost?"""
        return not self.group["decoupled_weight_decay"] and any(self.decays)

    @property
    def has_decoupled_decay(self) -> bool:
        return bool(self.group["decoupled_weight_decay"]) and any(self.decays)


def have_moved(params: Iterable[Tensor]) -> None:
    """Tell autograd, which sees neither kernels nor graphs: a backward pass through what they were is an error."""
    torch.autograd.graph.increment_version(params)

"""The final time T as something to optimise: the closed form of App. B.4 of the paper.

With L̃ = L + (c/2) T², Gauss-Newton L_xx ≈ L_x L_x^T and ψ = F(T, x_T)^T L_x:

    Q^T = ℓ + c T + ψ,   Q^TT = c + ψ²,   Q_0^{Tθ} = ψ p_0^T,
    δT = −η_T (Q^T + ψ · p_0^T δθ) / Q^TT

where p_0 is the gradient of the parameters, δθ the step that they have just taken, and ℓ = γ/2 |θ|² the running cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ocnopt.capture import sinks_of, trains
from ocnopt.distributed import World
from ocnopt.ode.field import State, as_tuple
from ocnopt.scaling import Scaling

METHODS = ("feedback", "first_order")


@dataclass(frozen=True)
class Horizon:
    """How to learn T, the length of the time interval.

    Args:
        penalty: c, the price of time: (c/2) T² is added to the loss.
        lr: η_T, the step size of T. 1 is the full second-order step of ``"feedback"``.
        update_every: steps of the optimizer between two of T.
        minimum: T never gets shorter than this.
        method: ``"feedback"``, the closed form above, which knows what the parameters have just done, or
            ``"first_order"``, the gradient step δT = −η_T (c T + ψ) of the adjoint method.
    """

    penalty: float
    lr: float = 0.1
    update_every: int = 1
    minimum: float = 0.05
    method: str = "feedback"

    def __post_init__(self) -> None:
        for name, zero in (("penalty", True), ("lr", False), ("minimum", False)):
            if not _is_number(getattr(self, name), zero):
                raise ValueError(f"{name} must be a number {'≥' if zero else '>'} 0, got {getattr(self, name)!r}")
        if not _is_count(self.update_every):
            raise ValueError(f"update_every must be a whole number ≥ 1, got {self.update_every!r}")
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {self.method!r}")

    def step(self, T: float, psi: float, p_dtheta: float = 0.0, cost: float = 0.0) -> float:
        """δT, without the bound. ``p_dtheta`` is p_0^T δθ, ``cost`` is ℓ."""
        if self.method == "first_order":
            return -self.lr * (self.penalty * T + psi)
        Q_T, Q_TT = cost + self.penalty * T + psi, self.penalty + psi**2
        return -self.lr * (Q_T + psi * p_dtheta) / Q_TT if Q_TT else 0.0


class LearnedHorizon(nn.Module):
    """T of one block, kept in its ``state_dict``. It follows the steps of an optimizer."""

    def __init__(self, settings: Horizon, T: float) -> None:
        super().__init__()
        if settings.minimum > T:
            raise ValueError(f"minimum must not exceed the length of the time interval, {T}, got {settings.minimum}")
        self.settings, self.T, self.count = settings, T, 0
        self._psi: list[Tensor] = []  # of the gradient that the field holds now
        self._backward = -1  # the pass in which the last of them arrived
        self._before: list[Tensor] = []
        self._handles: dict[int, list[RemovableHandle]] = {}
        self._scaling: dict[int, Scaling] = {}  # by optimizer, as the handles

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.T, self.count], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.T, self.count = float(state[0]), int(state[1])

    def __getstate__(self) -> dict[str, Any]:  # of a copy or a pickle: no optimizer's steps move it
        return {**self.__dict__, "_psi": [], "_before": [], "_handles": {}, "_scaling": {}}

    def extra_repr(self) -> str:
        return f"T={self.T:.6g}, {self.settings}"

    # --- ψ ---

    @property
    def due(self) -> bool:
        """Will the next step of the optimizer move T?"""
        return self.count + 1 >= self.settings.update_every

    @property
    def followed(self) -> bool:
        """Is there an optimizer whose steps move T?"""
        return bool(self._handles)

    def watch(self, field: nn.Module, speed: State, states: State, all_times: bool) -> None:
        """Add ψ = ⟨F(T, x_T), ∂L/∂x_T⟩ when the adjoint of the states arrives."""
        for f, x in zip(as_tuple(speed), as_tuple(states), strict=True):
            if x.requires_grad:
                x.register_hook(self._adder(field, f.detach(), all_times))

    def _adder(self, field: nn.Module, f: Tensor, all_times: bool) -> Callable[[Tensor], None]:
        sinks = sinks_of(field)

        def add(q: Tensor) -> None:
            if not trains(sinks):
                return
            self._begin(field)
            final = q.detach()[-1] if all_times else q.detach()
            self._psi.append((f.double() * final.double()).sum())

        return add

    def _begin(self, field: nn.Module) -> None:
        """Forget ψ of gradients that are gone (``zero_grad``, a step that was skipped) when a backward pass begins."""
        this = torch._C._current_graph_task_id()
        trained = [p for p in field.parameters() if p.requires_grad]
        if this != self._backward and trained and not any(p.grad is not None and p.grad.any() for p in trained):
            self._psi = []
        self._backward = this

    # --- the optimizer ---

    def follow(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
        """Move T after the steps of this optimizer (any of torch's). ``parameters`` are those of the field."""
        self.leave(optimizer)

        def before(*_: Any) -> None:
            if self.due and self.settings.method == "feedback":
                self._before = [p.detach().clone() for p in parameters]

        def after(stepped: torch.optim.Optimizer, *_: Any) -> None:
            self._after_step(stepped, parameters)

        scaling = Scaling(nn.ParameterList(parameters), lambda: self.due)
        self._scaling[id(optimizer)] = scaling
        self._handles[id(optimizer)] = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
            *scaling.handles,
        ]

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        for handle in self._handles.pop(id(optimizer), []):
            handle.remove()
        self._scaling.pop(id(optimizer), None)
        if not self.followed:
            self._psi = []

    def _after_step(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
        psi, before, scaling = self._psi, self._before, self._scaling[id(optimizer)]
        self._psi, self._before = [], []
        factor = scaling.factor(World()) if psi else None
        scaling.clear()
        self.count += 1
        if self.count < self.settings.update_every or not psi:
            return
        p_dtheta, cost = 0.0, 0.0
        if before:
            p_dtheta, cost = _inner(parameters, before), _running_cost(optimizer, parameters, before)
        sign = -1.0 if _climbs(optimizer, parameters) else 1.0  # what is minimised beside (c/2) T²: L, or −L
        slope = sign * float(torch.stack(psi).sum()) * (1.0 if factor is None else float(factor))
        delta = self.settings.step(self.T, slope, sign * p_dtheta, cost)
        if math.isfinite(delta):  # a bad batch moves nothing
            self.T = max(self.settings.minimum, self.T + delta)
            self.count = 0


def _inner(parameters: list[Tensor], before: list[Tensor]) -> float:
    """p_0^T δθ."""
    terms = [
        (p.grad.detach().double() * (p.detach().double() - old.double())).sum()
        for p, old in zip(parameters, before, strict=True)
        if p.grad is not None
    ]
    return float(torch.stack(terms).sum()) if terms else 0.0


def _climbs(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> bool:
    """Does the optimizer maximize the loss, as far as the field is concerned?"""
    mine = {id(p) for p in parameters}
    return any(
        group.get("maximize", False) for group in optimizer.param_groups if mine & {id(p) for p in group["params"]}
    )


def _running_cost(optimizer: torch.optim.Optimizer, parameters: list[Tensor], before: list[Tensor]) -> float:
    """ℓ = γ/2 |θ|², with the weight decay that is part of the loss; a decoupled one is not."""
    gammas = {
        id(p): 0.0 if group.get("decoupled_weight_decay") else float(group.get("weight_decay") or 0.0)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    pairs = zip(parameters, before, strict=True)
    return sum(g / 2 * float(old.double().square().sum()) for p, old in pairs if (g := gammas.get(id(p), 0.0)))


def _is_number(value: Any, zero: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value >= 0 if zero else value > 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1

"""The final time T as something to optimise: the closed form of App. B.4 of the paper.

With L̃ = L + (c/2) T², Gauss-Newton L_xx ≈ L_x L_x^T and ψ = F(T, x_T)^T L_x:

    Q^T = ℓ + c T + ψ,   Q^TT = c + ψ²,   Q_0^{Tθ} = ψ p_0^T,
    δT = −η_T (Q^T + ψ · p_0^T δθ) / Q^TT

where p_0 is the gradient of the parameters, δθ the step that they have just taken, and ℓ = γ/2 |θ|² the running cost.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ocnopt.backwards import Purpose, purpose, sinks_of
from ocnopt.distributed import World, check_known
from ocnopt.ode.field import State, as_tuple
from ocnopt.scaling import Scaling

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

METHODS = ("feedback", "first_order")


@dataclass(frozen=True)
class Horizon:
    """How to learn T, the length of the time interval.

    Args:
        penalty: c, the price of time: (c/2) T² is added to the loss. ``"first_order"`` may do without.
        lr: η_T, the step size of T. 1 is the full second-order step of ``"feedback"``.
        update_every: steps of the optimizer between two of T.
        minimum: T never gets shorter than this. It never more than doubles at a time, either.
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
        if self.method == "feedback" and not self.penalty:
            raise ValueError(
                "penalty must be > 0 with method='feedback', whose step would be -lr/ψ without it, the larger the less "
                "the loss depends on T"
            )

    def moved(self, T: float, delta: float) -> float:
        """T after a step, within its bounds."""
        return max(self.minimum, min(T + delta, 2 * T))

    def step(self, T: float, psi: float, p_dtheta: float = 0.0, cost: float = 0.0) -> float:
        """δT, without bounds. ``p_dtheta`` is p_0^T δθ, ``cost`` is ℓ."""
        if self.method == "first_order":
            return -self.lr * (self.penalty * T + psi)
        Q_T, Q_TT = cost + self.penalty * T + psi, self.penalty + psi**2
        return -self.lr * (Q_T + psi * p_dtheta) / Q_TT


class LearnedHorizon(nn.Module):
    """T of one block, kept in its ``state_dict``. It follows the steps of an optimizer.

    Of several that it follows, one moves it: the last of those that hold parameters of the field. Processes that train
    the network together move it alike: gradients are averaged over them, and so is ψ.
    """

    def __init__(self, settings: Horizon, T: float) -> None:
        super().__init__()
        if settings.minimum > T:
            raise ValueError(f"minimum must not exceed the length of the time interval, {T}, got {settings.minimum}")
        self.settings, self.T, self.count = settings, T, 0
        self._psi: list[Tensor] = []  # of the gradient that the field holds now
        self._backward = -1  # the pass in which the last of them arrived
        self._before: list[Tensor] = []
        self._handles: dict[int, list[RemovableHandle | Scaling]] = {}
        self._followed: dict[int, weakref.ref[torch.optim.Optimizer]] = {}  # by optimizer, as the handles
        self._scaling: dict[int, Scaling] = {}
        self._worlds: dict[int, World | None] = {}  # if somebody has said

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.T, self.count], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self.T, self.count = float(state[0]), int(state[1])

    def __getstate__(self) -> dict[str, Any]:  # of a copy or a pickle: no optimizer's steps move it
        nobody: dict[str, Any] = {name: {} for name in ("_handles", "_followed", "_scaling", "_worlds")}
        return {**self.__dict__, "_psi": [], "_before": [], **nobody}

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
        return any(ref() is not None for ref in self._followed.values())

    @property
    def alone(self) -> str:
        """What to say to whoever trains the field while nobody moves T."""
        return (
            f"learn_horizon: no optimizer moves T, which stays {self.T:g}: pass model=... to OCNOpt, or call "
            f"horizon.follow(optimizer, [*field.parameters()]) of the block for any other"
        )

    def watch(self, field: nn.Module, speed: State, states: State, all_times: bool) -> None:
        """Add ψ = ⟨F(T, x_T), ∂L/∂x_T⟩ when the adjoint of the states arrives."""
        for f, x in zip(as_tuple(speed), as_tuple(states), strict=True):
            if x.requires_grad:
                x.register_hook(self._adder(field, f.detach(), all_times))

    def _adder(self, field: nn.Module, f: Tensor, all_times: bool) -> Callable[[Tensor], None]:
        sinks = sinks_of(field)

        def add(q: Tensor) -> None:
            if purpose(sinks) is Purpose.OTHER:
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

    def follow(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: list[Tensor],
        process_group: ProcessGroup | Literal[False] | None = None,
    ) -> None:
        """Move T after the steps of this optimizer (any of torch's). ``parameters`` are those of the field.

        ``process_group``: the processes that train the network together, ``False`` if each has its own; an
        :class:`~ocnopt.OCNOpt` knows.
        """
        self.leave(optimizer)

        def before(stepping: torch.optim.Optimizer, *_: Any) -> None:
            if not (self.due and self._moved_by(stepping, parameters)):
                return
            self._world_of(stepping)  # what is wrong with it is found before anything moves
            if self.settings.method == "feedback":
                self._before = [p.detach().clone() for p in parameters]

        def after(stepped: torch.optim.Optimizer, *_: Any) -> None:
            if self._moved_by(stepped, parameters):
                self._after_step(stepped, parameters)
            scaling.clear()

        scaling = Scaling(nn.ParameterList(parameters), lambda: self.due)
        self._scaling[id(optimizer)], self._followed[id(optimizer)] = scaling, weakref.ref(optimizer)
        self._worlds[id(optimizer)] = None if process_group is None else World(process_group or None)
        self._handles[id(optimizer)] = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
            scaling,
        ]

    def leave(self, optimizer: torch.optim.Optimizer) -> None:
        for handle in self._handles.pop(id(optimizer), []):
            handle.remove()
        for kept in (self._scaling, self._followed, self._worlds):
            kept.pop(id(optimizer), None)
        if not self.followed:
            self._psi = []

    def _moved_by(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> bool:
        living = [each for ref in self._followed.values() if (each := ref()) is not None]
        holders = [each for each in living if _groups_of(each, parameters)]
        return optimizer is (holders or living)[-1]

    def _after_step(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> None:
        psi, before, scaling = self._psi, self._before, self._scaling[id(optimizer)]
        self._psi, self._before = [], []
        self.count += 1
        if self.count < self.settings.update_every:
            return
        world = self._world_of(optimizer)
        slope = self._slope(psi, scaling, world, parameters)
        if slope is not None:
            self._move(optimizer, parameters, before, slope)
        state = self.get_extra_state() if world.rank == 0 else torch.zeros(2, dtype=torch.float64)
        world.sum_([state])  # that of the first process
        self.set_extra_state(state)

    def _slope(self, psi: list[Tensor], scaling: Scaling, world: World, parameters: list[Tensor]) -> float | None:
        """ψ in the scale of the gradients, which are averages over the processes; ``None`` if none of them has any."""
        if world.size == 1 and not psi:
            return None
        factor = scaling.factor(world)
        scale = 1 / world.size if factor is None else float(factor)
        total = torch.zeros(2, dtype=torch.float64, device=parameters[0].device if parameters else None)
        if psi:
            total[0], total[1] = scale * sum(map(float, psi)), 1.0
        world.sum_([total])
        return float(total[0]) if total[1] else None

    def _world_of(self, optimizer: torch.optim.Optimizer) -> World:
        """The processes that train the network with this one."""
        world: World | None = self._worlds[id(optimizer)] or getattr(optimizer, "world", None)
        if world is None:
            check_known("learn_horizon")
        return world or World()

    def _move(
        self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], before: list[Tensor], slope: float
    ) -> None:
        p_dtheta, cost = 0.0, 0.0
        if before:
            p_dtheta, cost = _inner(parameters, before), _running_cost(optimizer, parameters, before)
        sign = -1.0 if _climbs(optimizer, parameters) else 1.0  # what is minimised beside (c/2) T²: L, or −L
        delta = self.settings.step(self.T, sign * slope, sign * p_dtheta, cost)
        if math.isfinite(delta):  # a bad batch moves nothing
            self.T, self.count = self.settings.moved(self.T, delta), 0


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
    return any(group.get("maximize", False) for group in _groups_of(optimizer, parameters))


def _groups_of(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> list[dict[str, Any]]:
    """Those in which the optimizer holds any of the parameters."""
    mine = {id(p) for p in parameters}
    return [group for group in optimizer.param_groups if mine & {id(p) for p in group["params"]}]


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

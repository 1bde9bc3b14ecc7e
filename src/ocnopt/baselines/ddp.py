"""Vanilla differential dynamic programming on a mini-batch, as practised in control (Tassa, Erez and Todorov
2012).

Full Q_uu, feedback gains, a backtracking line search and a regularisation schedule. Second derivatives of the
layers are omitted (the Gauss–Newton or "iLQR" form, as in the OCNOpt paper); the terminal cost has its exact
Hessian.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.optim.optimizer import ParamsT

from ocnopt.baselines.chain import BatchOptimizer, LossFn, Stage, Trajectory, require
from ocnopt.baselines.lq import Expansion, Plan, augmented, backward, expand

# Step lengths of the line search, and the least positive μ: the values of control practice.
BACKTRACKING = [1.1 ** -(i**2) for i in range(11)]
FIRST_MU = 1e-6


@dataclass(frozen=True)
class Outcome:
    """What the last step did: ``alpha`` is 0 where no step was accepted; costs include the weight decay."""

    alpha: float
    mu: float
    promised: float
    cost_before: float
    cost_after: float


class DDP(BatchOptimizer):
    """Vanilla DDP on a chain of ``nn.Linear`` layers and parameter-free modules; see ``step`` of the base
    class.

    Meant for small fully-connected networks: V_xx is a dense matrix over the joint state of the batch and
    Q_uu over the weights of a layer. A step whose matrices would have more than ``max_size`` rows is refused:
    batch × units of each layer, and units × min(batch, inputs + 1), must stay below it.

    One step is one DDP iteration: backward pass, then rollouts of the feedback policy with shorter and
    shorter open-loop steps α until the cost on the batch falls by at least ``accept`` of what the quadratic
    model promised. When Q_uu + μI is not positive definite, or no α is accepted, μ grows and the backward
    pass is repeated; beyond ``mu_max`` the step is given up and the parameters stay. After a success μ
    shrinks.

    Args:
        params: all parameters of ``model``, in one group.
        lr: the first α that the line search tries, in (0, 1]. 1 is DDP as published; on mini-batches it fits
            each batch and forgets the last.
        model: the chain of layers.
        loss_fn: ``loss_fn(output, target)``, a mean over the batch, twice differentiable.
        weight_decay: γ of the running cost γ/2 ‖θ‖².
        mu, mu_min, mu_max: the regularisation μ to start with, and its range. Control practice lets μ vanish
            after successes; on mini-batches it had better not.
        mu_factor: Δ₀, the factor of the quadratic schedule by which μ grows and shrinks.
        accept: least ratio of actual to promised decrease.
        max_size: largest matrix that is formed.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        *,
        model: nn.Module,
        loss_fn: LossFn = F.cross_entropy,
        weight_decay: float = 0.0,
        mu: float = 1.0,
        mu_min: float = 1e-2,
        mu_max: float = 1e10,
        mu_factor: float = 2.0,
        accept: float = 1e-4,
        max_size: int = 2048,
    ) -> None:
        require(0 < lr <= 1, "lr", "in (0, 1]", lr)
        require(weight_decay >= 0, "weight_decay", "at least 0", weight_decay)
        require(0 <= mu_min <= mu <= mu_max, "mu", "between mu_min and mu_max, none of them negative", mu)
        require(mu_factor > 1, "mu_factor", "greater than 1", mu_factor)
        require(0 <= accept < 1, "accept", "in [0, 1)", accept)
        require(max_size >= 1, "max_size", "at least 1", max_size)
        defaults = {"lr": lr, "weight_decay": weight_decay, "mu_min": mu_min, "mu_max": mu_max}
        defaults |= {"mu_factor": mu_factor, "accept": accept, "max_size": max_size}
        super().__init__(params, defaults, model=model, loss_fn=loss_fn)
        if set(self.param_groups[0]["params"]) != set(self.chain.parameters()):
            raise ValueError("params must hold every parameter of model: DDP plans for all layers together")
        self._layers = [_linear_and_tail(stage) for stage in self.chain.stages]
        self._schedule.update(mu=mu, growth=1.0)
        self.outcome: Outcome | None = None

    @property
    def _schedule(self) -> dict[str, Any]:
        """μ and its growth Δ; kept with the first parameter, so that ``state_dict`` carries them."""
        state: dict[str, Any] = self.state[self.param_groups[0]["params"][0]]
        return state

    @torch.no_grad()
    def step(self, inputs: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]  # a batch, not a closure
        group, schedule = self.param_groups[0], self._schedule
        trajectory = self.chain.trajectory(inputs, target, self.loss_fn)
        self._refuse_size(trajectory)
        expansions = [expand(*layer, x) for layer, x in zip(self._layers, trajectory.states, strict=False)]
        V_x, V_xx = self._terminal(trajectory, target)
        thetas = [augmented(linear) for linear, _ in self._layers]
        cost = self._cost(trajectory.loss, thetas)
        self.outcome = Outcome(0.0, schedule["mu"], 0.0, cost, cost)
        at_entry = dict(schedule)
        while math.isfinite(cost):  # a batch without a finite cost cannot be improved: leave it
            plan = backward(expansions, V_x, V_xx, group["weight_decay"], schedule["mu"])
            if plan is not None and self._search(plan, expansions, trajectory.states, target, cost):
                self._shrink_mu()
                break
            if not self._grow_mu():
                schedule.update(at_entry)  # one hopeless batch says nothing about the next
                break
        return trajectory.loss

    def _search(
        self, plan: Plan, expansions: list[Expansion], states: list[Tensor], target: Tensor, cost: float
    ) -> bool:
        """Backtrack along α; take the first step that keeps its promise."""
        group = self.param_groups[0]
        for alpha in (group["lr"] * shrink for shrink in BACKTRACKING):
            thetas, output = self._rollout(plan, expansions, states, alpha)
            after = self._cost(self.loss_fn(output, target), thetas)
            promised = plan.promised(alpha)
            if promised < 0 and after - cost <= group["accept"] * promised:
                for (linear, _), theta in zip(self._layers, thetas, strict=True):
                    _assign(linear, theta)
                self.outcome = Outcome(alpha, self._schedule["mu"], promised, cost, after)
                return True
        return False

    def _rollout(
        self, plan: Plan, expansions: list[Expansion], states: list[Tensor], alpha: float
    ) -> tuple[list[Tensor], Tensor]:
        """Run the network with each layer changed by its policy, which sees how far its input has moved."""
        x, thetas = states[0], []
        for (linear, tail), policy, e, x_bar in zip(self._layers, plan.policies, expansions, states, strict=False):
            control = alpha * policy.k
            if policy.K is not None:
                control = control + policy.K @ (x - x_bar).double().flatten()
            theta = (e.theta + e.lift(control) + alpha * policy.unseen).to(x.dtype)
            thetas.append(theta)
            bias = theta[:, -1] if theta.shape[1] > linear.in_features else None
            x = tail(F.linear(x, theta[:, : linear.in_features], bias))
        return thetas, x

    def _terminal(self, trajectory: Trajectory, target: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient and Hessian of the loss in the joint output."""
        output = trajectory.states[-1].double()
        target = target.double() if target.is_floating_point() else target
        with torch.enable_grad():
            V_xx = hessian(lambda z: self.loss_fn(z, target), output, vectorize=True)
        return trajectory.adjoints[-1].double().flatten(), V_xx.reshape(output.numel(), -1)

    def _cost(self, loss: Tensor, thetas: list[Tensor]) -> float:
        gamma: float = self.param_groups[0]["weight_decay"]
        return float(loss) + gamma / 2 * sum(float(theta.double().square().sum()) for theta in thetas)

    def _grow_mu(self) -> bool:
        schedule, group = self._schedule, self.param_groups[0]
        growth = max(group["mu_factor"], schedule["growth"] * group["mu_factor"])
        mu = max(FIRST_MU, schedule["mu"] * growth)
        if mu > group["mu_max"]:
            return False
        schedule.update(mu=mu, growth=growth)
        return True

    def _shrink_mu(self) -> None:
        schedule, group = self._schedule, self.param_groups[0]
        growth = min(1 / group["mu_factor"], schedule["growth"] / group["mu_factor"])
        schedule.update(mu=max(group["mu_min"], schedule["mu"] * growth), growth=growth)

    def _refuse_size(self, trajectory: Trajectory) -> None:
        limit = self.param_groups[0]["max_size"]
        for stage, x in zip(self.chain.stages, trajectory.states, strict=False):
            if x.dim() != 2:
                shape = tuple(x.shape)
                raise ValueError(f"inputs must reach layer {stage.name!r} as [batch, features]; got {shape}")
        for stage, rows in zip(self.chain.stages, self._sizes(trajectory), strict=True):
            if rows > limit:
                raise ValueError(
                    f"inputs (a batch of {len(trajectory.states[0])}) need a matrix of {rows} rows at layer "
                    f"{stage.name!r}, more than max_size={limit}: vanilla DDP is for small networks and batches"
                )

    def _sizes(self, trajectory: Trajectory) -> Iterator[int]:
        """Rows of the largest matrix at each stage: V_xx of its output or Q_uu of its controls."""
        for (linear, _), x, output in zip(self._layers, trajectory.states, trajectory.states[1:], strict=False):
            yield max(output.numel(), linear.out_features * min(len(x), augmented(linear).shape[1]))


def _linear_and_tail(stage: Stage) -> tuple[nn.Linear, nn.Sequential]:
    linear, *tail = stage.module
    if not isinstance(linear, nn.Linear):
        kind = type(linear).__name__
        raise ValueError(f"model must have no parametrised layer but nn.Linear for DDP; layer {stage.name!r} is {kind}")
    for module in tail:
        if isinstance(module, nn.modules.batchnorm._NormBase) or next(module.buffers(), None) is not None:
            raise ValueError(
                f"model must treat samples independently and keep no statistics for DDP; "
                f"after layer {stage.name!r} comes {type(module).__name__}"
            )
    return linear, nn.Sequential(*tail)


def _assign(linear: nn.Linear, theta: Tensor) -> None:
    linear.weight.copy_(theta[:, : linear.in_features])
    if theta.shape[1] > linear.in_features:
        linear.bias.copy_(theta[:, linear.in_features])

"""E-MSA: the extended method of successive approximations (Li, Chen, Tai and E 2017).

Pontryagin's maximum principle says that the optimal parameters of every layer maximise its Hamiltonian,
H_k(θ) = ⟨p_{k+1}, f_k(x_k, θ)⟩ − ℓ(θ), along the states x and costates p = −∂L/∂x. Maximising H alone
diverges, because new parameters no longer produce the states and costates that H was built from. E-MSA
maximises the *augmented* Hamiltonian

    H̃_k(θ) = H_k(θ) − ρ/2 ‖x_{k+1} − f_k(x_k, θ)‖² − ρ/2 ‖p_k − ∂H_k/∂x_k‖²,

which charges for both infeasibilities, layer by layer and independently, with L-BFGS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.optimizer import ParamsT

from ocnopt.baselines.chain import BatchOptimizer, LossFn, Stage, Trajectory, require


@dataclass(frozen=True)
class AugmentedHamiltonian:
    """H̃ of one stage as a function of its parameters, averaged over the samples.

    Costates are per sample, p_i = −B ∂L/∂x_i for a loss that is a mean over B samples: then neither ρ nor the
    maximiser depends on the batch size, and at the current parameters ∂H̃/∂θ = −∂L/∂θ − γθ for every ρ.
    """

    stage: nn.Module
    x: Tensor  # x_k
    v: Tensor  # x_{k+1}: the state that f_k must reproduce
    p: Tensor  # p_{k+1}
    q: Tensor  # p_k: the costate that ∂H_k/∂x_k must reproduce
    rho: float
    weight_decay: float = 0.0

    def __call__(self, theta: Mapping[str, Tensor]) -> Tensor:
        batch = self.x.shape[0]
        # Buffers are handed over as copies: batch statistics must not drift with the number of evaluations.
        buffers = {name: b.clone() for name, b in self.stage.named_buffers()}
        x = self.x.detach().requires_grad_(self.rho > 0)
        f = functional_call(self.stage, {**theta, **buffers}, (x,))
        inner: Tensor = (self.p * f).sum()
        running_cost = self.weight_decay / 2 * torch.stack([t.square().sum() for t in theta.values()]).sum()
        H = inner / batch - running_cost
        if self.rho == 0:
            return H
        (H_x,) = torch.autograd.grad(inner, x, create_graph=True)
        infeasible: Tensor = (self.v - f).square().sum() + (self.q - H_x).square().sum()
        return H - self.rho / 2 * infeasible / batch


class EMSA(BatchOptimizer):
    """E-MSA on a chain of stages (an ``nn.Sequential``; a residual block inside it is one stage); see
    ``step`` of the base class.

    All stages are maximised against the same trajectory, as in the paper. A maximisation that does not raise
    H̃ is undone.

    Args:
        params: parameters of ``model``, in one group; what is left out stays fixed.
        lr: how far to go towards the maximiser, in (0, 1]; 1 is the method as published.
        model: the chain of layers.
        loss_fn: ``loss_fn(output, target)``, a mean over the batch.
        rho: ρ, the price of infeasibility; larger is slower and safer. 0 is the basic method, which diverges
            in general.
        weight_decay: γ of the running cost ℓ(θ) = γ/2 ‖θ‖².
        max_iter: L-BFGS iterations per stage and step.
        history_size: L-BFGS memory.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        *,
        model: nn.Module,
        loss_fn: LossFn = F.cross_entropy,
        rho: float = 3.0,
        weight_decay: float = 0.0,
        max_iter: int = 10,
        history_size: int = 10,
    ) -> None:
        require(0 < lr <= 1, "lr", "in (0, 1]", lr)
        require(rho >= 0, "rho", "at least 0", rho)
        require(weight_decay >= 0, "weight_decay", "at least 0", weight_decay)
        require(max_iter >= 1, "max_iter", "at least 1", max_iter)
        require(history_size >= 1, "history_size", "at least 1", history_size)
        defaults = {"lr": lr, "rho": rho, "weight_decay": weight_decay, "max_iter": max_iter}
        super().__init__(params, {**defaults, "history_size": history_size}, model=model, loss_fn=loss_fn)
        self.gains: dict[str, float] = {}  # by how much the last step raised H̃, stage by stage

    @torch.no_grad()
    def step(self, inputs: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]  # a batch, not a closure
        group = self.param_groups[0]
        trained = set(group["params"])
        trajectory = self.chain.trajectory(inputs, target, self.loss_fn)
        self.gains = {}
        for k, stage in enumerate(self.chain.stages):
            theta = {name: p for name, p in stage.module.named_parameters() if p in trained}
            if not theta:
                continue
            H = self.hamiltonian(trajectory, k)
            best, self.gains[stage.name] = maximise(H, theta, group["max_iter"], group["history_size"])
            for name, p in theta.items():
                p.lerp_(best[name], group["lr"])
        return trajectory.loss

    def hamiltonian(self, trajectory: Trajectory, k: int) -> AugmentedHamiltonian:
        """H̃_k along a trajectory."""
        stage: Stage = self.chain.stages[k]
        x, v = trajectory.states[k : k + 2]
        q, p = (-x.shape[0] * d for d in trajectory.adjoints[k : k + 2])
        group = self.param_groups[0]
        return AugmentedHamiltonian(stage.module, x, v, p, q, group["rho"], group["weight_decay"])


def maximise(
    objective: Callable[[Mapping[str, Tensor]], Tensor],
    start: Mapping[str, Tensor],
    max_iter: int,
    history_size: int,
) -> tuple[dict[str, Tensor], float]:
    """Where L-BFGS with a strong Wolfe line search takes ``objective`` from ``start``, and the gain.

    Without a gain (a maximum already, or values that are not finite) the answer is ``start`` itself and 0.
    """
    theta = {name: p.detach().clone().requires_grad_() for name, p in start.items()}
    variables = list(theta.values())
    lbfgs = torch.optim.LBFGS(
        variables,
        max_iter=max_iter,
        history_size=history_size,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-10,  # max_iter is what ends it, unless it has arrived
        tolerance_change=1e-14,
    )

    def closure() -> Tensor:
        value = -objective(theta)
        for variable, gradient in zip(variables, torch.autograd.grad(value, variables), strict=True):
            variable.grad = gradient.contiguous()  # L-BFGS flattens it with a view
        return value.detach()

    with torch.enable_grad():
        before = float(closure())
        lbfgs.step(closure)
        gain = before - float(closure())
    if not 0 < gain < float("inf"):  # also when it is NaN
        return {name: p.detach().clone() for name, p in start.items()}, 0.0
    return {name: t.detach() for name, t in theta.items()}, gain

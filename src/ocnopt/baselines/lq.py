"""The linear-quadratic heart of DDP: expand every stage, then run the Bellman equation backwards.

The letters are those of the control literature. The state is the joint one, all B samples stacked: X_k has N
= B·d entries and V_xx is a dense N×N matrix. The control of a stage is its weight matrix, bias included, seen
through an orthonormal basis of the inputs of the batch: B samples only reach B directions of input space, and
along the others the cost is just the weight decay, so nothing of the full Q_uu is lost and its size falls
from d·(n+1) to d·min(B, n+1). Everything is float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap


@dataclass(frozen=True)
class Expansion:
    """First-order expansion of x_{k+1} = g(Θ x̃_k), x̃ = (x, 1), at one trajectory.

    The Jacobians f_x, ``[B·d, B·n]``, and f_u, ``[B·d, m·r]``, are kept in factors and only ever applied from
    the right.
    """

    theta: Tensor  # Θ, [m, n+1] (or [m, n] without a bias)
    basis: Tensor  # [n+1, r], orthonormal columns that span the inputs of the batch
    inputs: Tensor  # [B, n], x_k
    seen_inputs: Tensor  # [B, r], x̃_k in the basis
    g_z: Tensor  # [B, d, m], Jacobian of g at each sample

    def times_f_u(self, rows: Tensor) -> Tensor:
        """``rows @ f_u``, ``[·, m·r]``."""
        return torch.einsum("pim,ir->pmr", self._times_g_z(rows), self.seen_inputs).flatten(1)

    def times_f_x(self, rows: Tensor) -> Tensor:
        """``rows @ f_x``, ``[·, B·n]``."""
        return (self._times_g_z(rows) @ self.theta[:, : self.inputs.shape[1]]).flatten(1)

    def _times_g_z(self, rows: Tensor) -> Tensor:
        return torch.einsum("pid,idm->pim", rows.unflatten(1, self.g_z.shape[:2]), self.g_z)

    @property
    def seen(self) -> Tensor:
        """The parameters in control coordinates, [m·r]."""
        return (self.theta @ self.basis).flatten()

    @property
    def unseen(self) -> Tensor:
        """The part of Θ that no input of the batch reaches, [m, n+1]."""
        return self.theta - self.theta @ self.basis @ self.basis.T

    def lift(self, control: Tensor) -> Tensor:
        """A change of the controls as a change of Θ."""
        return control.view(self.theta.shape[0], -1) @ self.basis.T


def expand(linear: nn.Linear, tail: Callable[[Tensor], Tensor], x: Tensor) -> Expansion:
    """Expand one Linear layer followed by a parameter-free ``tail`` that treats samples independently."""
    theta, x = augmented(linear).double(), x.double()
    n = theta.shape[1]
    inputs = torch.cat([x, x.new_ones(len(x), n - x.shape[1])], dim=1)  # no column where there is no bias
    # The identity keeps the controls readable as Θ itself where a basis would not make them fewer.
    basis = torch.linalg.qr(inputs.T).Q if len(x) < n else torch.eye(n).to(inputs)
    g_z = vmap(jacrev(lambda z: tail(z[None])[0].flatten()))(inputs @ theta.T)
    return Expansion(theta, basis, x, inputs @ basis, g_z)


def augmented(linear: nn.Linear) -> Tensor:
    """Θ: the weight with the bias as last column."""
    bias: Tensor | None = linear.bias  # torch declares it as always there
    weight = linear.weight.detach()
    return weight if bias is None else torch.cat([weight, bias.detach()[:, None]], dim=1)


@dataclass(frozen=True)
class Policy:
    """δu_k = α k + K δx_k, and the change of Θ along the directions no sample sees."""

    k: Tensor  # [P]
    K: Tensor | None  # [P, B·n]; the first stage has none, its state never moves
    unseen: Tensor  # [m, n+1], open loop


@dataclass(frozen=True)
class Plan:
    """Policies of all stages and the change of cost they promise: α·linear + α²·quadratic.

    Exactly what the policy does to the quadratic model for α = 1 or μ = 0, and the usual estimate otherwise.
    """

    policies: list[Policy]
    linear: float
    quadratic: float

    def promised(self, alpha: float) -> float:
        return alpha * self.linear + alpha**2 * self.quadratic


def backward(expansions: list[Expansion], V_x: Tensor, V_xx: Tensor, gamma: float, mu: float) -> Plan | None:
    """The Bellman recursion with Q_uu + μI in place of Q_uu in the gains; ``None`` where that is not positive
    definite.

    The value function is that of the regularised policy under the unregularised model (Tassa, Erez and
    Todorov 2012, eq. 11).
    """
    policies: list[Policy] = []
    linear = quadratic = 0.0
    for number, e in reversed(list(enumerate(expansions))):
        Q_u = e.times_f_u(V_x[None])[0] + gamma * e.seen
        Vf_u = e.times_f_u(V_xx)
        Q_uu = e.times_f_u(Vf_u.T)
        Q_uu.diagonal().add_(gamma + mu)
        factor, info = torch.linalg.cholesky_ex(Q_uu)
        if int(info) != 0:
            return None
        k = -torch.cholesky_solve(Q_u[:, None], factor)[:, 0]
        unseen = -gamma / (gamma + mu) * e.unseen if gamma > 0 else torch.zeros_like(e.theta)
        # Here and below Q_uu k = −Q_u − μk and Q_uu K = −Q_ux − μK for the Q_uu without μ.
        linear += float(k @ Q_u + gamma * (unseen * e.unseen).sum())
        quadratic += float(-k @ Q_u - mu * k @ k + gamma * unseen.square().sum()) / 2
        K = None
        if number > 0:
            Q_ux = e.times_f_x(Vf_u.T)
            root = torch.linalg.solve_triangular(factor, Q_ux, upper=False)
            K = -torch.linalg.solve_triangular(factor.T, root, upper=True)
            V_x = e.times_f_x(V_x[None])[0] + Q_ux.T @ k - mu * K.T @ k
            V_xx = e.times_f_x(e.times_f_x(V_xx).T) - root.T @ root - mu * K.T @ K
            V_xx = (V_xx + V_xx.T) / 2
        policies.insert(0, Policy(k, K, unseen))
    return Plan(policies, linear, quadratic)

"""DDP with every matrix formed in full, beside the whole-network Gauss-Newton step that it must reproduce.

A mini-batch of B samples is one dynamical system with the joint state X_k = [x_k^1; ...; x_k^B], flattened to
a vector x of n numbers; theta_k is a vector of P numbers, shared by all samples.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

Layer = Callable[[Tensor, Tensor], Tensor]  # X_{k+1} = f_k(X_k, theta_k); samples along dimension 0
Layers = Sequence[Layer]
Tensors = Sequence[Tensor]
Cost = Callable[[Tensor], tuple[Tensor, Tensor]]  # X_K -> V_x (n), V_xx (n x n)
Metric = Tensors | Callable[[int, Tensor, Tensor], Tensor]  # M_k, or a rule (k, Q_u, V_{k+1}^x) -> M_k
Scales = Sequence[float | Tensor]  # one per layer; a tensor: one per parameter
Joint = tuple[Callable[[Tensor], Tensor], Tensor, int]  # F, z, n of `_joint`


@dataclass
class Solution:
    """Entry k belongs to layer k; X, Vx, Vxx and dx have one entry more, for the last layer's output."""

    X: list[Tensor]
    fx: list[Tensor] = field(init=False)
    fu: list[Tensor] = field(init=False)
    Qx: list[Tensor] = field(init=False)
    Qu: list[Tensor] = field(init=False)
    Qxx: list[Tensor] = field(init=False)
    Qxu: list[Tensor] = field(init=False)
    Quu: list[Tensor] = field(init=False)
    k: list[Tensor] = field(init=False)  # open loop, P
    K: list[Tensor] = field(init=False)  # closed loop, P x n
    Vx: list[Tensor] = field(init=False)
    Vxx: list[Tensor] = field(init=False)
    dx: list[Tensor] = field(init=False)
    dtheta: list[Tensor] = field(init=False)  # the step to take
    projections: list[int] = field(init=False)  # how many directions of V_xx had to be projected

    def __post_init__(self) -> None:
        for f in fields(self)[1:]:
            size = len(self.X) if f.name in ("Vx", "Vxx", "dx") else len(self.X) - 1
            setattr(self, f.name, [0 if f.name == "projections" else torch.empty(0)] * size)


def stage(module: nn.Module) -> tuple[Layer, Tensor]:
    """A module as (f, theta): its trainable parameters, flattened and joined in the order of `parameters()`.

    Pass a layer together with its activation, so that the states are the inputs of parametrised layers.
    """
    module = copy.deepcopy(module).double()  # f must not change when the user's module is trained
    params = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}

    def f(X: Tensor, theta: Tensor) -> Tensor:
        pieces = theta.split([p.numel() for p in params.values()])
        named = {name: v.view_as(p) for (name, p), v in zip(params.items(), pieces, strict=True)}
        return functional_call(module, named, (X,))  # type: ignore[no-any-return]

    return f, torch.cat([torch.empty(0, dtype=torch.float64), *(p.flatten() for p in params.values())])


def states(layers: Layers, thetas: Tensors, X0: Tensor) -> list[Tensor]:
    """The nominal trajectory X_0, ..., X_K (eq. ff)."""
    X = [X0]
    for f, theta in zip(layers, thetas, strict=True):
        X.append(f(X[-1], theta))
    return X


def grouped_cost(loss: Callable[[Tensor], Tensor], rank: int = 1, beta: float = 1.0) -> Cost:
    """V_x = dL/dX_K and V_xx = D Sigma D^T: column g of D is V_x on the rows of group g, zero elsewhere.

    Sample i of B is in group floor(i rank / B); Sigma = diag(beta^2 B / n_g). Rank 1 is the paper's y y^T,
    rank B the full empirical Gauss-Newton matrix of a loss that is a batch mean.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")

    def cost(X: Tensor) -> tuple[Tensor, Tensor]:
        B, r = len(X), min(rank, len(X))
        member = torch.eye(r, dtype=torch.float64)[torch.arange(B) * r // B]  # B x r
        Vx = grad(loss)(X).flatten()
        D = torch.einsum("bi,bg->big", Vx.view(B, -1), member).reshape(-1, r)
        return Vx, D @ torch.diag(beta**2 * B / member.sum(0)) @ D.T

    return cost


def solve(
    layers: Layers,
    thetas: Tensors,
    X0: Tensor,
    terminal: Cost,
    metric: Metric,
    linear_cost: Tensors = (),
    *,
    mode: str = "consistent",
    rollout: str = "nonlinear",
    step: float | Scales = 1.0,
    fraction: float | Scales = 1.0,
    feedback: bool = True,
    players: Sequence[Sequence[int]] = (),
) -> Solution:
    """One DDP step with the cost l_k^T dtheta_k + dtheta_k^T M_k dtheta_k / 2 on each layer (l: linear_cost).

    mode: "consistent" has Q_uu = f_u^T V_xx f_u + M_k, and "second_order" adds the second derivatives of f_k;
        "paper" has Q_uu := M_k and projects the value where M_k is too small.
    step: the plan is step * (k + K dx). The learning rate of "paper"; in the other modes it belongs in M_k.
    fraction: the part of the plan that is taken. A nonlinear rollout sees the part, a linear one the plan.
    feedback: False sets Q_ux := 0. An integer X0 (token ids) cannot move: it is a state of size 0.
    players: sizes of the parts of each theta_k that do not cooperate: the policy has their own blocks of Q_uu alone.
    """
    if mode not in ("consistent", "second_order", "paper") or rollout not in ("nonlinear", "linear"):
        raise ValueError(f"mode or rollout is unknown: mode={mode!r}, rollout={rollout!r}")
    if any(theta.dtype != torch.float64 for theta in thetas):
        raise ValueError("thetas must be float64")
    s = Solution(states(layers, thetas, X0))
    joint = [_joint(f, X, theta) for f, X, theta in zip(layers, s.X, thetas, strict=False)]
    s.Vx[-1], s.Vxx[-1] = terminal(s.X[-1])
    for k in reversed(range(len(layers))):
        _expand(s, k, joint[k], metric, linear_cost[k] if linear_cost else 0, mode)
        if not feedback:
            s.Qxu[k] = torch.zeros_like(s.Qxu[k])
        _minimise(s, k, project=mode == "paper" and feedback)
        if players:
            own = s.Quu[k] * torch.block_diag(*(torch.ones(n, n) for n in players[k]))
            s.k[k], s.K[k] = -torch.linalg.solve(own, s.Qu[k]), -torch.linalg.solve(own, s.Qxu[k].T)
    scales = (x if isinstance(x, Sequence) else [x] * len(layers) for x in (step, fraction))
    _roll_out(s, joint, rollout, *scales)
    return s


def _joint(f: Layer, X: Tensor, theta: Tensor) -> Joint:
    """f as a map F of the one vector z = [x; theta]; the nominal z; the size n of x."""
    n = X.numel() if X.is_floating_point() else 0
    z = torch.cat([X.flatten(), theta]) if n else theta
    return lambda z: f(z[:n].view_as(X) if n else X, z[n:]).flatten(), z, n


def _expand(s: Solution, k: int, joint: Joint, metric: Metric, l: Tensor | int, mode: str) -> None:
    F, z, n = joint
    Vx, Vxx = s.Vx[k + 1], s.Vxx[k + 1]
    s.fx[k], s.fu[k] = fx, fu = jacrev(F)(z).tensor_split([n], dim=1)
    s.Qx[k], s.Qu[k] = fx.T @ Vx, fu.T @ Vx + l  # eq. (Qx-Qu)
    M = metric(k, s.Qu[k], Vx.view_as(s.X[k + 1])) if callable(metric) else metric[k]
    if M.shape != (len(z) - n, len(z) - n) or not torch.allclose(M, M.T):
        raise ValueError(f"metric of layer {k} must be a symmetric {len(z) - n} x {len(z) - n} matrix")
    s.Qxx[k], s.Qxu[k] = fx.T @ Vxx @ fx, fx.T @ Vxx @ fu  # eq. (Q2nd)
    s.Quu[k] = M if mode == "paper" else fu.T @ Vxx @ fu + M
    if mode == "second_order":
        H = jacrev(jacrev(lambda z: F(z) @ Vx))(z)
        s.Qxx[k], s.Qxu[k], s.Quu[k] = s.Qxx[k] + H[:n, :n], s.Qxu[k] + H[:n, n:], s.Quu[k] + H[n:, n:]


def _minimise(s: Solution, k: int, project: bool) -> None:
    """The policy (eq. opt-u), and the value (eq. Vx-xx) for the layer before."""
    L, failed = torch.linalg.cholesky_ex(s.Quu[k])
    if failed:
        raise ValueError(f"metric of layer {k} is too small: Q_uu is not positive definite")
    s.k[k] = -torch.cholesky_solve(s.Qu[k][:, None], L)[:, 0]
    s.K[k] = -torch.cholesky_solve(s.Qxu[k].T, L)
    s.Vx[k] = s.Qx[k] + s.Qxu[k] @ s.k[k]
    s.Vxx[k] = s.Qxx[k] + s.Qxu[k] @ s.K[k]
    if project:
        # With V_{k+1}^xx = R R^T, q = f_x^T R, p = f_u^T R: V_k^xx = q (I - p^T Q_uu^{-1} p) q^T, and a small
        # Q_uu makes the bracket indefinite. V_x is cut in the same directions, or its sign would flip.
        variance, basis = torch.linalg.eigh(s.Vxx[k + 1])
        R = basis * variance.clamp(min=0).sqrt()
        q, p = s.fx[k].T @ R, s.fu[k].T @ R
        lam, U = torch.linalg.eigh(p.T @ torch.cholesky_solve(p, L))
        s.Vx[k] = s.Qx[k] + q @ U @ ((p @ U).T @ s.k[k] / lam.clamp(min=1))
        s.Vxx[k] = q @ U @ torch.diag((1 - lam).clamp(min=0)) @ (q @ U).T
        s.projections[k] = int((lam > 1).sum())


def _roll_out(s: Solution, joint: list[Joint], rollout: str, step: Scales, fraction: Scales) -> None:
    """Each layer answers to the change dx that the layers before it have caused (eq. dxk)."""
    s.dx[0] = torch.zeros_like(s.Qx[0])
    for k, (F, z, _) in enumerate(joint):
        plan = step[k] * (s.k[k] + s.K[k] @ s.dx[k])
        s.dtheta[k] = fraction[k] * plan
        if rollout == "linear":
            s.dx[k + 1] = s.fx[k] @ s.dx[k] + s.fu[k] @ plan
        else:
            s.dx[k + 1] = F(z + torch.cat([s.dx[k], s.dtheta[k]])) - s.X[k + 1].flatten()


def gauss_newton_step(
    layers: Layers, thetas: Tensors, X0: Tensor, terminal: Cost, metric: Tensors, linear_cost: Tensors = ()
) -> list[Tensor]:
    """The minimiser over all layers at once, -(J^T V_xx J + diag M_k)^{-1} (J^T V_x + l), J = dX_K/dtheta."""
    sizes = [len(theta) for theta in thetas]
    J = jacrev(lambda t: states(layers, t.split(sizes), X0)[-1].flatten())(torch.cat(list(thetas)))
    Vx, Vxx = terminal(states(layers, thetas, X0)[-1])
    g = J.T @ Vx + (torch.cat(list(linear_cost)) if linear_cost else 0)
    return list(torch.linalg.solve(J.T @ Vxx @ J + torch.block_diag(*metric), -g).split(sizes))

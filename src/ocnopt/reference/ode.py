"""Neural ODEs with dense matrices, in float64: slow, readable, and written without the engine.

The second-order terms of the continuous-time Bellman objective are solved backward as matrices, eq. (dQ), with those
of the integration time, eq. (dQt11). The mini-batch is one system: x is the joint state of all samples, flattened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

Derivative = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def rk4(derivative: Derivative, state: tuple[Tensor, ...], start: float, end: float, steps: int) -> list[
    tuple[Tensor, ...]
]:  # fmt: skip
    """The states at the ends of all steps, the first included."""
    path, dt = [state], torch.tensor((end - start) / steps, dtype=torch.float64)

    def moved(state: tuple[Tensor, ...], slope: tuple[Tensor, ...], by: Tensor) -> tuple[Tensor, ...]:
        return tuple(s + by * k for s, k in zip(state, slope, strict=True))

    for i in range(steps):
        t = start + i * dt
        k1 = derivative(t, state)
        k2 = derivative(t + dt / 2, moved(state, k1, dt / 2))
        k3 = derivative(t + dt / 2, moved(state, k2, dt / 2))
        k4 = derivative(t + dt, moved(state, k3, dt))
        slope = tuple((a + 2 * b + 2 * c + d) / 6 for a, b, c, d in zip(k1, k2, k3, k4, strict=True))
        state = moved(state, slope, dt)
        path.append(state)
    return path


class DenseField:
    """F and its Jacobians for the flat joint state and the flat parameters."""

    def __init__(self, field: nn.Module, like: Tensor) -> None:
        self.field, self.shape = field, like.shape
        self.named = {n: p.detach().double() for n, p in field.named_parameters()}
        self.theta = torch.cat([p.flatten() for p in self.named.values()])

    def __call__(self, t: Tensor, x: Tensor, theta: Tensor | None = None) -> Tensor:
        flat = self.theta if theta is None else theta
        parts = flat.split([p.numel() for p in self.named.values()])
        named = {n: part.view_as(p) for (n, p), part in zip(self.named.items(), parts, strict=True)}
        out: Tensor = functional_call(self.field, named, (t, x.view(self.shape)))
        return out.flatten()

    def jacobians(self, t: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """∂F/∂x ``[n, n]`` and ∂F/∂θ ``[n, P]``."""
        F_x, F_theta = jacrev(lambda x, theta: self(t, x, theta), argnums=(0, 1))(x, self.theta)
        return F_x, F_theta


@dataclass
class DenseODE:
    """Everything at time 0: q_0, p_0, and the matrices of the quadratic expansion."""

    q: Tensor
    p: Tensor
    Q_xx: Tensor
    Q_xu: Tensor
    Q_uu: Tensor
    Q_Tx: Tensor
    Q_Tu: Tensor
    psi: Tensor


def backward(
    field: nn.Module, x_T: Tensor, L_x: Tensor, t: tuple[float, float], *, gamma: float = 0.0, steps: int = 200
) -> DenseODE:
    """Solve eqs. (qt-cont), (dQ) and (dQt11) from the end of the interval, with Q_T^xx = L_x L_x^T."""
    F = DenseField(field, x_T)
    x, q = x_T.detach().double().flatten(), L_x.detach().double().flatten()
    n, P = len(x), len(F.theta)
    eye = torch.eye(P, dtype=torch.float64)
    psi = F(torch.tensor(t[1], dtype=torch.float64), x) @ q

    def derivative(t: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, q, _, Q_xx, Q_xu, _, Q_Tx, _ = state
        F_x, F_u = F.jacobians(t, x)
        minus = (
            -F(t, x), F_x.T @ q, F_u.T @ q,
            F_x.T @ Q_xx + Q_xx @ F_x,
            F_x.T @ Q_xu + Q_xx @ F_u,
            F_u.T @ Q_xu + Q_xu.T @ F_u + gamma * eye,
            Q_Tx @ F_x, Q_Tx @ F_u,
        )  # fmt: skip
        return tuple(-m for m in minus)

    zeros = [torch.zeros(shape, dtype=torch.float64) for shape in ((P,), (n, P), (P, P), (P,))]
    start = (x, q, zeros[0], torch.outer(q, q), zeros[1], zeros[2], psi * q, zeros[3])
    _, q, p, Q_xx, Q_xu, Q_uu, Q_Tx, Q_Tu = rk4(derivative, start, t[1], t[0], steps)[-1]
    return DenseODE(q, p, Q_xx, Q_xu, Q_uu, Q_Tx, Q_Tu, psi)

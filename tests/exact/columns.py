"""DDP on given group gradients: for networks whose G_k are not what a chain of stages would give.

Coordinates of the groups in the state, full matrices in the parameters: Q_θθ = G Σ G^T + M is formed and inverted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from tests.exact.dense import group_columns
from tests.exact.nets import B
from torch import Tensor


def sizes(rank: int) -> Tensor:
    """n_g."""
    group = torch.arange(B) * rank // B
    return torch.bincount(group).double()


@dataclass
class Policy:
    """The policy of every stage, from G_k [P×r], M_k [P×P] and ℓ_k [P]."""

    G: Sequence[Tensor]
    M: Sequence[Tensor]
    cost: Sequence[Tensor]
    beta: float
    a: list[Tensor] = field(init=False)
    Sigma: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        n = sizes(self.G[0].shape[1])
        self.a, self.Sigma = [torch.ones_like(n)], [torch.diag(self.beta**2 * B / n)]
        for G, M, l in reversed(list(zip(self.G, self.M, self.cost, strict=True))):
            a, Sigma = self.a[0], self.Sigma[0]
            gains = torch.linalg.solve(G @ Sigma @ G.T + M, torch.cat([(G @ a + l)[:, None], G @ Sigma], 1))
            self.a.insert(0, a - Sigma @ G.T @ gains[:, 0])
            self.Sigma.insert(0, Sigma - Sigma @ G.T @ gains[:, 1:])

    def step(self, k: int, s: Tensor) -> Tensor:
        """δθ_k for the change s of the groups' losses."""
        G, a, Sigma = self.G[k], self.a[k + 1], self.Sigma[k + 1]
        return -torch.linalg.solve(G @ Sigma @ G.T + self.M[k], G @ (a + Sigma @ s) + self.cost[k])

    def linear_rollout(self) -> list[Tensor]:
        s, steps = torch.zeros_like(self.a[0]), []
        for k, G in enumerate(self.G):
            steps.append(self.step(k, s))
            s = s + G.T @ steps[-1]
        return steps

    def nonlinear_rollout(self, change: Callable[[list[Tensor]], Tensor], fraction: float = 1.0) -> list[Tensor]:
        """``change``: s of the next stage, after the steps of the stages so far; ``fraction`` of each is taken."""
        steps: list[Tensor] = []
        for k in range(len(self.G)):
            s = change(steps) if steps else torch.zeros_like(self.a[0])
            steps.append(fraction * self.step(k, s))
        return steps


def group_gradients(output: Tensor, adjoint: Tensor, of: Sequence[Tensor], rank: int) -> list[Tensor]:
    """Columns of the gradients of each group's loss, P×r, by one backward pass a group."""
    masked = group_columns(adjoint, rank).T.reshape(rank, *output.shape)
    rows = [torch.autograd.grad(output, of, h, retain_graph=True) for h in masked]
    return [torch.stack([g.flatten() for g in column], 1) for column in zip(*rows, strict=True)]


def spread(G: Tensor, grad: Tensor) -> Tensor:
    """G_g + (n_g/B)(p.grad − Σ G_g): the columns after something has happened to p.grad."""
    return G + torch.outer(grad.flatten() - G.sum(1), sizes(G.shape[1]) / B)

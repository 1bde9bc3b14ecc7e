"""What OCNOpt must do, step after step, by the dense solver: momentum, weight decay and metrics included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tests.exact.metrics import Options, Slot, slots, statistics, take_turns
from tests.exact.nets import Batch, Net, loss, rank_of
from torch import Tensor
from torch.func import grad

from ocnopt import OCNOpt
from ocnopt.reference import Solution, grouped_cost, solve, stage, states


@dataclass
class Expected:
    """One step."""

    solution: Solution
    D: list[Tensor]  # adjoints of the states, one column a group
    M: list[Tensor]
    cost: list[Tensor]  # ℓ
    dtheta: list[Tensor]

    @property
    def G(self) -> list[Tensor]:
        """Group gradients, P×r."""
        return [fu.T @ D for fu, D in zip(self.solution.fu, self.D[1:], strict=True)]


def group_columns(adjoint: Tensor, rank: int) -> Tensor:
    """The adjoint of a state, [B, ...], as one column for each group of samples."""
    rows = adjoint.flatten(1)
    group = torch.tensor([i * rank // len(rows) for i in range(len(rows))])
    return torch.stack([torch.where((group == g)[:, None], rows, 0).flatten() for g in range(rank)], 1)


# The table of momentum: M = long_run · C / η, ℓ = γθ + carried · m, and φ.


def long_run(o: Options) -> float:
    return 1.0 if o["ema"] else 1 - o["momentum"]


def carried(o: Options) -> float:
    mu: float = o["momentum"]
    if o["ema"]:
        return mu / (1 - mu)
    return mu**2 / (1 + mu) if o["nesterov"] else mu


def fraction(o: Options, t: int) -> float:
    mu: float = o["momentum"]
    if o["ema"]:
        return (1 - mu) / (1 - mu**t) if o["bias_correction"] else 1 - mu
    return 1 - mu**2 if o["nesterov"] else 1 - mu


def decay(o: Options) -> float:
    return 0.0 if o["decoupled_weight_decay"] else o["weight_decay"]


def decoupled_decay(o: Options) -> float:
    return o["weight_decay"] if o["decoupled_weight_decay"] else 0.0


class Dense:
    """A network's trajectory under the dense solver. Reads hyper-parameters from the optimizer, nothing else."""

    def __init__(self, net: Net, opt: OCNOpt) -> None:
        options = {p: group for group in opt.param_groups for p in group["params"]}
        self.game = opt.param_groups[0]
        self.paper = self.game["bellman"] == "paper"
        self.layers, thetas = zip(*(stage(piece) for piece in net.pieces), strict=True)
        self.thetas = list(thetas)
        self.slots = [slots(piece, options) for piece in net.pieces]
        self.statistics = [statistics(*each) for each in zip(net.pieces, self.slots, strict=True)]
        take_turns([layer for theirs in self.statistics for layer in theirs])
        self.m = [torch.zeros_like(theta) for theta in self.thetas]
        self.t = 0

    def each(self, rule: Callable[[Options], float]) -> list[Tensor]:
        """A hyper-parameter as one vector for each stage."""

        def of(slot: Slot) -> Tensor:
            return torch.full((slot.parameter.numel(),), rule(slot.options), dtype=torch.float64)

        return [torch.cat([of(slot) for slot in slots]) for slots in self.slots]

    def step(self, batch: Batch) -> Expected:
        self.t += 1
        X0, targets = batch
        rank = rank_of(self.game["rank"])
        X = states(self.layers, self.thetas, X0)
        adjoints = self._adjoints(X, targets)
        M = [] if self.paper else [self._metric(k, X[k], V) for k, V in enumerate(adjoints)]
        gamma, kept = self.each(decay), self.each(carried)
        cost = [gamma[k] * theta + kept[k] * self.m[k] for k, theta in enumerate(self.thetas)]
        drift = self._drift()
        s = solve(
            self.layers,
            self.thetas,
            X0,
            grouped_cost(lambda x: loss(x, targets), rank, self.game["gauss_newton"]),
            (lambda k, _, Vx: self._metric(k, X[k], Vx)) if self.paper else M,
            [l + extra for l, extra in zip(cost, self._as_cost(drift, M), strict=True)],
            mode=self.game["bellman"],
            rollout=self.game["feedback"],
            step=self._step_size(),
            fraction=self.each(lambda o: fraction(o, self.t)),
        )
        D = [group_columns(adjoints[-1], rank)]
        for fx in reversed(s.fx):
            D.insert(0, fx.T @ D[0])
        expected = Expected(s, D, s.Quu if self.paper else M, cost, s.dtheta)
        self._take(expected, drift)
        return expected

    def _step_size(self) -> list[Tensor]:
        """What the plan is multiplied with: paper mode has the learning rate outside."""
        return self.each(lambda o: o["lr"] if self.paper else 1.0)

    def _adjoints(self, X: list[Tensor], targets: Tensor) -> list[Tensor]:
        """∂L/∂X_1, …, ∂L/∂X_K."""

        def tail(k: int) -> Callable[[Tensor], Tensor]:
            return lambda x: loss(states(self.layers[k:], self.thetas[k:], x)[-1], targets)

        return [grad(tail(k))(X[k]) for k in range(1, len(X))]

    def _metric(self, k: int, X: Tensor, adjoint: Tensor) -> Tensor:
        scale = self.each(lambda o: long_run(o) / (1.0 if self.paper else o["lr"]))[k]
        blocks = [layer.metric(X, self.thetas[k], adjoint) for layer in self.statistics[k]]
        return scale[:, None] * torch.stack(blocks).sum(0)

    def _drift(self) -> list[Tensor]:
        """ηγθ of a decoupled weight decay."""
        rates = self.each(lambda o: o["lr"] * decoupled_decay(o))
        return [rate * theta for rate, theta in zip(rates, self.thetas, strict=True)]

    def _as_cost(self, drift: list[Tensor], M: list[Tensor]) -> list[Tensor]:
        """The linear cost that alone would make θ drift so."""
        if not self.paper:
            return [M_k @ d for M_k, d in zip(M, drift, strict=True)]
        names = {slot.options["curvature"] for slots in self.slots for slot in slots}
        assert names == {"identity"} or not any(d.any() for d in drift), "M must be known beforehand"
        return [gain * d for gain, d in zip(self.each(lambda o: long_run(o) / o["lr"]), drift, strict=True)]

    def _take(self, e: Expected, drift: list[Tensor]) -> None:
        """Move θ and m as the plan says."""
        phi, mu = self.each(lambda o: fraction(o, self.t)), self.each(lambda o: o["momentum"])
        new = self.each(lambda o: 1 - o["momentum"] if o["ema"] else 1.0)
        if any(d.any() for d in drift):
            e.dtheta = self._roll_out(e.solution, phi, drift)
        for k, dtheta in enumerate(e.dtheta):
            direction = -e.M[k] @ ((dtheta + drift[k]) / (phi[k] * self._step_size()[k]))  # G w + ℓ
            q = direction - e.cost[k] + self.each(decay)[k] * self.thetas[k]
            self.m[k] = mu[k] * self.m[k] + new[k] * q
            self.thetas[k] = self.thetas[k] + dtheta

    def _roll_out(self, s: Solution, phi: list[Tensor], drift: list[Tensor]) -> list[Tensor]:
        """The solver's policy, but a decoupled decay is taken whole, whatever the fraction of the rest."""
        dx, dtheta = torch.zeros(s.Qx[0].shape, dtype=torch.float64), []
        for k, (f, X) in enumerate(zip(self.layers, s.X, strict=False)):
            plan = self._step_size()[k] * (s.k[k] + s.K[k] @ dx)
            dtheta.append(phi[k] * (plan + drift[k]) - drift[k])
            if self.game["feedback"] == "linear":
                dx = s.fx[k] @ dx + s.fu[k] @ plan
            else:
                moved = X + dx.view_as(X) if X.is_floating_point() else X
                dx = (f(moved, self.thetas[k] + dtheta[k]) - s.X[k + 1]).flatten()
        return dtheta

"""How accurate are Kronecker factors along a solve? Rules of quadrature against integration on a fine grid.

    python benchmarks/quadrature.py

A tanh network of width 16 in 8 dimensions, in float64; ``gain`` multiplies its first weights. The table has the largest
relative error of A = ∫ E[z zᵀ] dt and C = ∫ E[h hᵀ] dt over both layers. The solver's own evaluations (their number in
brackets) are weighted as dopri5 weighs them, and one of these weights is negative: of the factors that this makes, the
smallest eigenvalue, over the norm, is in the last column.
"""

from __future__ import annotations

import torch
from _report import markdown
from torch import Tensor, nn
from torchdiffeq import odeint
from torchdiffeq._impl.dopri5 import _DORMAND_PRINCE_SHAMPINE_TABLEAU as DOPRI5

from ocnopt.ode.quadrature import gauss_legendre

T = 1.0
Pair = tuple[Tensor, Tensor]
Factors = list[Tensor]
#: times and weights
Rule = list[tuple[float, float]]


class Network(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width + 1, hidden).double(), nn.Linear(hidden, width).double()

    def layers(self, t: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.cat([x, t.expand(len(x), 1)], 1)
        return z, torch.tanh(self.one(z))

    def pair(self, t: Tensor, pair: Pair) -> Pair:
        """(x, q) ↦ (dx/dt, dq/dt)."""
        x, q = pair
        _, a = self.layers(t, x)
        return self.two(a), -((q @ self.two.weight) * (1 - a**2)) @ self.one.weight[:, :-1]

    def factors(self, t: Tensor, pair: Pair) -> Factors:
        """z zᵀ and h hᵀ of both layers, averaged over the samples."""
        x, q = pair
        z, a = self.layers(t, x)
        h = (q @ self.two.weight) * (1 - a**2)
        return [v.T @ v / len(v) for v in (z, h, a, q)]


def at(network: Network, end: Pair, times: list[float], tolerance: float) -> list[Factors]:
    """The factors at some times, in any order, by a solve backward from the end."""
    order = sorted(set(times) | {T}, reverse=True)
    stops = torch.tensor(order, dtype=torch.float64)
    xs, qs = odeint(network.pair, end, stops, rtol=tolerance, atol=tolerance)
    found = {t: network.factors(torch.tensor(t), (x, q)) for t, x, q in zip(order, xs, qs, strict=True)}
    return [found[t] for t in times]


def integrated(network: Network, end: Pair, rule: Rule, tolerance: float) -> Factors:
    values = at(network, end, [t for t, _ in rule], tolerance)
    return [sum(w * v[i] for (_, w), v in zip(rule, values, strict=True)) for i in range(4)]  # type: ignore[misc]


def simpson(intervals: int) -> Rule:
    weights = [1.0, *(4.0 if i % 2 else 2.0 for i in range(1, intervals)), 1.0]
    return [(T * i / intervals, w * T / intervals / 3) for i, w in enumerate(weights)]


def uniform(samples: int) -> Rule:
    return [(T * i / (samples - 1), T / samples) for i in range(samples)]


def own_evaluations(network: Network, end: Pair, tolerance: float) -> tuple[Factors, int]:
    """The stages of every accepted step, with the weights of the method, at the states that the solver visited."""
    accepted: list[tuple[float, float, Pair]] = []

    class Followed(nn.Module):
        def forward(self, t: Tensor, pair: Pair) -> Pair:
            return network.pair(t, pair)

        def callback_accept_step(self, t: Tensor, pair: Pair, dt: Tensor) -> None:
            accepted.append((float(t), -float(dt), pair))  # the times that it sees are the true ones, the step is not

    odeint(Followed(), end, torch.tensor([T, 0.0], dtype=torch.float64), rtol=tolerance, atol=tolerance)
    total, count = [torch.zeros(())] * 4, 0
    nodes = [0.0, *DOPRI5.alpha.tolist()]
    for t, dt, pair in accepted:
        dt = max(dt, -t)  # the last step goes beyond the end of the interval, and is interpolated
        slopes: list[Pair] = []
        for node, beta, weight in zip(nodes, [None, *DOPRI5.beta], DOPRI5.c_sol.tolist(), strict=True):
            coefficients = [] if beta is None else beta.tolist()
            moved = (
                pair[0] + dt * sum(b * s[0] for b, s in zip(coefficients, slopes, strict=True)),
                pair[1] + dt * sum(b * s[1] for b, s in zip(coefficients, slopes, strict=True)),
            )
            when = torch.tensor(t + node * dt, dtype=torch.float64)
            slopes.append(network.pair(when, moved))
            if weight:
                seen, count = network.factors(when, moved), count + 1
                total = [a - dt * weight * b for a, b in zip(total, seen, strict=True)]
    return total, count


def worst(found: Factors, exact: Factors) -> str:
    return f"{max(float((f - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)):.0e}"


@torch.no_grad()
def main() -> int:
    rows = []
    for gain, samples in ((1.0, 32), (3.0, 32), (3.0, 2)):  # a tame field, one that turns more, a small batch
        torch.manual_seed(0)
        network = Network(8, 16)
        network.one.weight *= gain
        end = torch.randn(samples, 8, dtype=torch.float64), torch.randn(samples, 8, dtype=torch.float64)
        exact = integrated(network, end, simpson(200), 1e-11)
        for tolerance in (1e-3, 1e-6):
            errors = {}
            for n in (2, 4, 6):
                rule = [(T * s, T * w) for s, w in gauss_legendre(n)]
                errors[f"{n} nodes"] = worst(integrated(network, end, rule, tolerance), exact)
            errors["100 uniform"] = worst(integrated(network, end, uniform(100), tolerance), exact)
            own, count = own_evaluations(network, end, tolerance)
            lowest = min(float(torch.linalg.eigvalsh(f).min() / f.norm()) for f in own)
            errors["own evaluations"] = f"{worst(own, exact)} ({count})"
            rows.append([f"{gain:g}", str(samples), f"{tolerance:g}", *errors.values(), f"{lowest:.0e}"])
    header = ["gain", "samples", "tolerance", *errors, "smallest eigenvalue of those"]
    print(markdown(header, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

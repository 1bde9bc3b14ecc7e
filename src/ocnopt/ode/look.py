"""What the layers of the field see along a solve, by quadrature: eq. (ekfac-snopt) of the paper.

The state and its adjoint (x_t, q_t) are solved backward from the end of the interval once more, with the nodes of a
quadrature as output times; there every layer's input z and output adjoint h = (∂F/∂output)^T q are read off one
evaluation of the field. Where the field contracts, x_t cannot be solved backward over the whole interval: if it does
not come back to where it began, the interval is halved, with a forward solve to its middle. A block inside the field is
asked in its turn, with the adjoint at its output. The solves of the user's forward and backward pass are never touched,
and nothing is kept but the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ocnopt.hosts import CannotTell
from ocnopt.layers.base import Call
from ocnopt.ode.field import Field, State, as_tuple, finite
from ocnopt.ode.quadrature import gauss_legendre
from ocnopt.ode.solver import Solver
from ocnopt.ode.times import on_device
from ocnopt.ode.watch import Watch

Parts = tuple[Tensor, ...]
_HALVINGS = 6
# of the way: by how much x may miss its beginning before its interval is halved, and when that is of no more use: what
# contracts misses it by far
_TOLERANCE, _LAST_TOLERANCE = 0.02, 0.3


class Adjoint:
    """The pair (x_t, q_t): dx/dt = F, dq/dt = −(∂F/∂x)^T q."""

    def __init__(self, F: Field, tupled: bool) -> None:
        self.F, self.tupled = F, tupled

    def state(self, parts: Parts) -> State:
        return parts if self.tupled else parts[0]

    def __call__(self, t: Tensor, pair: Parts) -> Parts:
        x, q = pair[: len(pair) // 2], pair[len(pair) // 2 :]
        with torch.enable_grad():
            leaves = tuple(part.detach().requires_grad_() for part in x)
            value = self.F(t, self.state(leaves))
            values = value if isinstance(value, tuple) else (value,)
            found = _vjp(values, leaves, q)
        return (*(v.detach() for v in values), *(-g for g in found))


def _vjp(values: Parts, inputs: Sequence[Tensor], q: Parts) -> list[Tensor]:
    pairs = [(v, w) for v, w in zip(values, q, strict=True) if v.requires_grad]
    if not pairs:  # the field depends on nothing of it
        return [torch.zeros_like(i) for i in inputs]
    outputs, weights = zip(*pairs, strict=True)
    found: Sequence[Tensor | None] = torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
    return [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, found, strict=True)]


def along_solve(
    solver: Solver,
    F: Field,
    times: tuple[float, ...],
    trajectory: Sequence[Parts | None],
    adjoints: Sequence[Parts],
    tupled: bool,
    nodes: int,
    layers: Mapping[str, nn.Module],
) -> dict[str, list[Call]]:
    """The calls of the layers at the nodes of each interval between two times, weighted by time.

    ``trajectory`` is x at all times, the first of which may be lost; ``adjoints`` are ∂L/∂x at the times 1, 2, …: the
    adjoint jumps there.
    """
    pair, calls = Adjoint(F, tupled), {path: list[Call]() for path in layers}
    back = Backward(solver, pair)
    whole = abs(times[-1] - times[0])
    q = tuple(torch.zeros_like(part) for part in adjoints[-1])
    for k in range(len(times) - 1, 0, -1):
        start, end = times[k], times[k - 1]
        q = tuple(part + jump for part, jump in zip(q, adjoints[k - 1], strict=True))
        at = [start + (end - start) * s for s, _ in gauss_legendre(nodes)]
        x = trajectory[k]
        assert x is not None
        seen_at, q = back.solve((end, trajectory[k - 1]), (start, x), q, at, _HALVINGS)
        sign = 1.0 if start > end else -1.0  # of an interval that runs backward in time
        for t, here, (_, w) in zip(at, seen_at, gauss_legendre(nodes), strict=True):
            weight = abs(end - start) * w
            for path, call in observe(pair, on_device([t], here[0])[0], here, layers):
                call.h, call.duration, call.share = sign * call.h, weight * call.duration, weight / whole * call.share
                calls[path].append(call)
    return calls


class Backward:
    """Solves (x_t, q_t) backward over an interval both ends of which are known."""

    def __init__(self, solver: Solver, pair: Adjoint) -> None:
        self.solver, self.pair = solver, pair

    def solve(
        self, first: tuple[float, Parts | None], last: tuple[float, Parts], q: Parts, at: Sequence[float], halvings: int
    ) -> tuple[list[Parts], Parts]:
        """(x, q) at the times ``at``, in the order of the solve, and q at the first time."""
        (t0, x0), (T, xT) = first, last
        rows = self._rows((*xT, *q), [T, *at, t0])
        tolerance = _TOLERANCE if halvings else _LAST_TOLERANCE
        if rows is not None and (x0 is None or self._came_back(rows[-1][: len(q)], x0, xT, tolerance)):
            return rows[1:-1], rows[-1][len(q) :]
        if x0 is None or not halvings:
            raise CannotTell("its state and adjoint cannot be solved backward: the field contracts too strongly")
        middle = (t0 + T) / 2
        x = self._forward(x0, t0, middle)
        # to the end as well: on a coarser grid, or with the random numbers of the look, it need not meet x_T again
        late, q = self.solve(
            (middle, x), (T, self._forward(x, middle, T)), q, [t for t in at if abs(t - T) <= abs(middle - T)],
            halvings - 1,
        )  # fmt: skip
        early, q = self.solve(first, (middle, x), q, at[len(late) :], halvings - 1)
        return late + early, q

    def _rows(self, start: Parts, stops: Sequence[float]) -> list[Parts] | None:
        """The pair at all stops, or ``None`` if the solver gave up or found something that is not finite."""
        at = on_device(stops, start[0]).tolist()
        distinct = {t: i for i, t in enumerate(dict.fromkeys(at))}  # a node may be where the interval was halved
        try:
            rows = self.solver.backward(self.pair, start, on_device(tuple(distinct), start[0]))
        except AssertionError:
            if self.pair.F.inside:  # the field's own
                raise
            return None
        return [tuple(part[distinct[t]] for part in rows) for t in at] if finite(rows) else None

    def _came_back(self, back: Parts, x0: Parts, xT: Parts, tolerance: float) -> bool:
        way = _norm(x0) + _norm(tuple(b - a for a, b in zip(x0, xT, strict=True)))
        missed = _norm(tuple(b - a for a, b in zip(x0, back, strict=True)))
        size = math.sqrt(sum(part.numel() for part in x0))
        return missed <= (tolerance + 10 * self.solver.rtol) * way + 10 * self.solver.atol * size

    def _forward(self, x: Parts, t: float, T: float) -> Parts:
        with torch.no_grad():
            found = as_tuple(self.solver.plain(self.pair.F, self.pair.state(x), on_device([t, T], x[0])))
        if not finite(found):
            raise CannotTell("the state is not finite")
        return tuple(part[-1] for part in found)


def _norm(parts: Parts) -> float:
    return float(torch.stack([torch.linalg.vector_norm(part.double()) for part in parts]).square().sum().sqrt())


def observe(pair: Adjoint, t: Tensor, here: Parts, layers: Mapping[str, nn.Module]) -> list[tuple[str, Call]]:
    """One evaluation of the field: every call of the layers, with ∂⟨q, F⟩/∂(output) for its adjoint."""
    x, q = here[: len(here) // 2], here[len(here) // 2 :]
    watch = Watch(pair.F.module, layers)
    with torch.enable_grad(), watch.hooked():
        leaves = tuple(part.detach().requires_grad_() for part in x)
        value = pair.F(t, pair.state(leaves))
        found = _vjp(value if isinstance(value, tuple) else (value,), watch.probes, q)
    return watch.told(found)

"""What the layers of the field see along a solve, by quadrature: eq. (ekfac-snopt) of the paper.

The state and its adjoint (x_t, q_t) are solved backward from the end of the interval once more, with the nodes of a
quadrature as output times; there every layer's input z and output adjoint h = (∂F/∂output)^T q are read off one
evaluation of the field. The solves of the user's forward and backward pass are never touched, and nothing is kept but
the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ocnopt import layers as adapters
from ocnopt.layers.base import Call, first_tensor
from ocnopt.ode.field import Field, State
from ocnopt.ode.quadrature import gauss_legendre
from ocnopt.ode.solver import Solver
from ocnopt.ode.times import on_device
from ocnopt.rng import RNGState
from ocnopt.trees import mapped

Parts = tuple[Tensor, ...]


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
    trajectory: Sequence[Parts],
    adjoints: Sequence[Parts],
    tupled: bool,
    nodes: int,
    layers: Mapping[str, nn.Module],
) -> dict[str, list[Call]]:
    """The calls of the layers at the nodes of each interval between two times, weighted by time.

    ``trajectory`` and ``adjoints`` are x and ∂L/∂x at the times 1, 2, …: the adjoint jumps there.
    """
    pair, calls = Adjoint(F, tupled), {path: list[Call]() for path in layers}
    whole = abs(times[-1] - times[0])
    q = tuple(torch.zeros_like(part) for part in trajectory[-1])
    for k in range(len(times) - 1, 0, -1):
        start, end = times[k], times[k - 1]
        x = trajectory[k - 1]
        q = tuple(part + jump for part, jump in zip(q, adjoints[k - 1], strict=True))
        at = [(start + (end - start) * s, abs(end - start) * w) for s, w in gauss_legendre(nodes)]
        stops = [start, *(t for t, _ in at), *([end] if k > 1 else [])]
        rows = solver.backward(pair, (*x, *q), on_device(stops, x[0]))
        for i, (_, weight) in enumerate(at, start=1):
            here = tuple(part[i] for part in rows)
            seen = observe(pair, on_device(stops, x[0])[i], here, layers)
            sign = 1.0 if start > end else -1.0  # of an interval that runs backward in time
            for path, call in seen:
                call.h, call.duration, call.share = sign * call.h, weight, weight / whole
                calls[path].append(call)
        q = tuple(part[-1] for part in rows[len(x) :])
    return calls


def observe(pair: Adjoint, t: Tensor, here: Parts, layers: Mapping[str, nn.Module]) -> list[tuple[str, Call]]:
    """One evaluation of the field: every call of the layers, with ∂⟨q, F⟩/∂(output) for its adjoint."""
    x, q = here[: len(here) // 2], here[len(here) // 2 :]
    seen: list[tuple[str, Call]] = []
    probes: list[Tensor] = []
    with torch.enable_grad(), _hooked(layers, seen, probes):
        leaves = tuple(part.detach().requires_grad_() for part in x)
        value = pair.F(t, pair.state(leaves))
        found = _vjp(value if isinstance(value, tuple) else (value,), probes, q)
    for (_, call), h in zip(seen, found, strict=True):
        call.h = h.detach()
    return seen


@contextmanager
def _hooked(layers: Mapping[str, nn.Module], seen: list[tuple[str, Call]], probes: list[Tensor]) -> Iterator[None]:
    handles = []
    for path, module in layers.items():
        begun: list[RNGState | None] = []
        handles += [
            module.register_forward_pre_hook(_before(begun)),
            module.register_forward_hook(_after(path, begun, seen, probes), with_kwargs=True, prepend=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _before(begun: list[RNGState | None]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        adapter, _ = adapters.find(module)
        random = adapter is not None and adapter.needs_rng(module)
        begun.append(RNGState.capture({p.device for p in module.parameters()}) if random else None)

    return hook


def _after(
    path: str, begun: list[RNGState | None], seen: list[tuple[str, Call]], probes: list[Tensor]
) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        out, rng = first_tensor(output), begun.pop()
        if out is None or not out.is_floating_point():
            return None
        # zero, and added to the output: its gradient is that of the output, whatever is done to that in place
        probe = torch.zeros_like(out).requires_grad_()
        args, kwargs = mapped(Tensor.detach, (args, kwargs))
        device = out.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        seen.append((path, Call(module, args, kwargs, probe, rng, module.training, autocast)))
        probes.append(probe)
        return mapped(lambda t: t + probe if t is out else t, output)

    return hook

"""FFJORD (Grathwohl et al., 2019): a density as the image of a Gaussian under the flow of an ODE.

With dz/dt = f(t, z) from the data at time 0 to the Gaussian at time T,

    log p(x) = log N(z_T; 0, I) + ∫ tr(∂f/∂z) dt,

and the trace is computed exactly, with one vector-Jacobian product a dimension, or estimated without bias as
ε^T (∂f/∂z) ε with one product in all (Hutchinson), where E[ε ε^T] = I.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from ocnopt.lab.models.ode.block import ode_block
from ocnopt.lab.models.plain import Shape, activation_of
from ocnopt.ode import NeuralODE
from ocnopt.ode.layers import ConcatSquashLinear, TimeSequential

Trace = Literal["exact", "rademacher", "gaussian"]

#: (z, ∫ tr dt), and the noise of the estimate where there is one
State = tuple[Tensor, ...]


class FlowField(nn.Module):
    """d(z, ℓ)/dt = (f(t, z), tr ∂f/∂z).

    A third part of the state is the noise ε of the estimate, which does not change: it belongs to the solve, so that
    the backward pass and whoever looks at the solve afterwards see the same function.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, t: Tensor, state: State) -> State:
        z, _, *noise = state
        wanted = torch.is_grad_enabled()
        with torch.enable_grad():
            z = z if wanted and z.requires_grad else z.detach().requires_grad_()
            f = self.net(t, z)
            trace = _estimate(f, z, noise[0].detach(), wanted) if noise else exact_trace(f, z, wanted)
        if not wanted:  # the solver must not keep the graph alive
            f, trace = f.detach(), trace.detach()
        return (f, trace, *map(torch.zeros_like, noise))


def exact_trace(f: Tensor, z: Tensor, differentiable: bool = True) -> Tensor:
    """tr ∂f/∂z of every sample, ``[B]``."""
    rows = [
        torch.autograd.grad(f[:, i].sum(), z, create_graph=differentiable, retain_graph=True)[0][:, i]
        for i in range(z.shape[1])
    ]
    return torch.stack(rows).sum(0)


def _estimate(f: Tensor, z: Tensor, noise: Tensor, differentiable: bool) -> Tensor:
    (product,) = torch.autograd.grad(f, z, noise, create_graph=differentiable)
    return (product * noise).sum(1)


class Flow(nn.Module):
    """Called with samples ``[B, D]``, it answers log p of each, ``[B]``.

    Args:
        blocks: solved one after another; their fields are :class:`FlowField`.
        dimension: D.
        trace: how it is found in training.
        test_trace: and how in ``eval()``; ``"exact"`` is the same for everybody, and costs D products.
    """

    def __init__(
        self, blocks: list[NeuralODE], dimension: int, trace: Trace = "exact", test_trace: Trace = "exact"
    ) -> None:
        super().__init__()
        self.blocks, self.dimension = nn.ModuleList(blocks), dimension
        self.trace, self.test_trace = trace, test_trace

    def forward(self, x: Tensor) -> Tensor:
        z, change = x, x.new_zeros(len(x))
        for block in self.blocks:
            z, change, *_ = block((z, change, *self._noise(z)))
        return log_normal(z) + change

    def _noise(self, z: Tensor) -> list[Tensor]:
        kind = self.trace if self.training else self.test_trace
        if kind == "exact":
            return []
        if kind == "gaussian":
            return [torch.randn_like(z)]
        return [torch.randint(2, z.shape, device=z.device).to(z.dtype) * 2 - 1]

    @torch.no_grad()
    def sample(self, count: int) -> Tensor:
        """``[count, D]``: Gaussian samples, taken along the flow the other way."""
        like = next(self.parameters())
        z = torch.randn(count, self.dimension, device=like.device, dtype=like.dtype)
        for block in reversed(self.blocks):
            assert isinstance(block, NeuralODE)
            z, *_ = block((z, z.new_zeros(count)), t=block.t[::-1])
        return z


def log_normal(z: Tensor) -> Tensor:
    """log N(z; 0, I) of every sample."""
    return -0.5 * (z.square().sum(1) + z.shape[1] * math.log(2 * math.pi))


def ffjord(
    input_shape: Shape,
    classes: int = 0,
    *,
    width: int = 64,
    depth: int = 3,
    activation: str = "tanh",
    flows: int = 1,
    time: float = 1.0,
    trace: Trace = "exact",
    test_trace: Trace = "exact",
    solver: str = "dopri5",
    rtol: float = 1e-6,
    atol: float = 1e-8,
    gradient: str = "adjoint",
    steps: int = 20,
) -> Flow:
    """``depth`` hidden layers of ``width`` units, each gated and shifted by the time; ``flows`` of these in a row.

    ``steps`` are those of a solver that does not choose its own.
    """
    if len(input_shape) != 1:
        raise ValueError(f"input_shape must be (features,) for this network; got {input_shape}")
    for name, value in (("width", width), ("depth", depth), ("flows", flows)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    act, dimension = activation_of(activation), input_shape[0]

    def flow() -> NeuralODE:
        sizes = [dimension, *[width] * depth, dimension]
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(sizes):
            layers += [ConcatSquashLinear(n_in, n_out), act()]
        field = FlowField(TimeSequential(*layers[:-1]))  # the speed is not activated
        return ode_block(field, time, solver, rtol, atol, gradient, steps)

    return Flow([flow() for _ in range(flows)], dimension, trace, test_trace)

"""What the feedback policy of a layer responds to most: the leading right singular vector of its gain.

The gain of layer k is Q_uu^{-1} Q_ux = M^{-1} G_k J_k^{-1} D_k^T, a matrix with a row for every parameter and a column
for every number of the joint state of the batch: far too large to form. But its rows lie in the span of D_k, so with
the r×r matrices

    N = J_k^{-1} (G_k^T M^{-2} G_k) J_k^{-1},    C = D_k^T D_k,

the right singular vectors are v = D_k c, where N C c = σ² c and c^T C c = 1. D_k has one column per group of samples,
zero outside the group, so C is diagonal. Projected to image space, that is through the transposed Jacobian of
everything before the layer, the adjoints D_k become those of the input: v turns into D_0 c, with no further
approximation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

Named = dict[str, Tensor]


@dataclass(frozen=True)
class Gain:
    """The gain of one layer on one batch.

    Attributes:
        layer: its name.
        singular_values: ``[r]``, the largest first.
        coefficients: ``[B]``, c of the leading vector: how much each sample takes part.
        state: ``[B, ...]``, the leading vector, in the shape of the layer's input.
        image: ``[B, ...]``, the same, projected to the input of the network.
    """

    layer: str
    singular_values: Tensor
    coefficients: Tensor
    state: Tensor
    image: Tensor


def leading_gains(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    lr: float,
    rank: int | None = None,
    gauss_newton: float = 1.0,
    curvature: Mapping[str, Tensor] | None = None,
) -> list[Gain]:
    """The leading right singular vector of every layer's gain.

    Args:
        model: a chain: its layers with parameters are called once each, one after another. In evaluation mode, so that
            samples do not mix.
        x, y: a batch, for a mean cross-entropy.
        lr: η.
        rank: groups of samples; by default every sample is one.
        gauss_newton: β.
        curvature: the diagonal of C by parameter name, as the adaptive curvature has it; the identity if left out.
    """
    groups = _membership(len(y), rank or len(y)).to(x)
    adjoints = _adjoints(model, x, y)  # by layer, in the order of the calls
    image = _input_adjoint(model, x, y)
    G = _group_gradients(model, x, y, groups)
    metric = {name: (curvature or {}).get(name, torch.ones_like(p)) / lr for name, p in model.named_parameters()}
    J = torch.diag(groups.mean(0)) / gauss_newton**2
    gains = []
    for layer in reversed(adjoints):
        names = [f"{layer}.{name}" if layer else name for name, _ in model.get_submodule(layer).named_parameters()]
        J = J + _gram(G, metric, names, power=1)
        middle = torch.linalg.solve(J, torch.linalg.solve(J, _gram(G, metric, names, power=2)).T)
        gains.append(_gain(layer, middle, adjoints[layer], image, groups))
    return gains[::-1]


def _gain(layer: str, N: Tensor, d: Tensor, d0: Tensor, groups: Tensor) -> Gain:
    C = groups.T @ d.flatten(1).square().sum(1)
    root = C.sqrt()
    values, vectors = torch.linalg.eigh(root[:, None] * N * root)
    c = torch.where(root > 0, vectors[:, -1] / root, 0.0)
    c = groups @ (c * c.sum().sign())  # the sign of a singular vector is free
    singular = values.flip(0).clamp(min=0).sqrt()
    return Gain(layer, singular, c, _scaled(d, c), _scaled(d0, c))


def _scaled(d: Tensor, c: Tensor) -> Tensor:
    return d * c.view(-1, *[1] * (d.dim() - 1))


def _membership(batch: int, rank: int) -> Tensor:
    """``[B, r]``: 1 where a sample is in a group."""
    rank = min(rank, batch)
    return torch.eye(rank)[torch.arange(batch) * rank // batch]


def _gram(G: Named, metric: Named, names: list[str], power: int) -> Tensor:
    """G^T M^{-power} G over these parameters."""
    blocks = [(G[name], G[name] / metric[name].flatten() ** power) for name in names]
    return torch.stack([left @ right.T for left, right in blocks]).sum(0)


def _group_gradients(model: nn.Module, x: Tensor, y: Tensor, groups: Tensor) -> Named:
    """``[r, P]`` for every parameter: gradients of the mean loss, summed over the samples of each group."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.detach() for name, b in model.named_buffers()}

    def loss(params: Named, x: Tensor, y: Tensor) -> Tensor:
        output: Tensor = functional_call(model, (params, buffers), (x[None],))
        return cross_entropy(output, y[None]) / len(groups)

    samples = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    return {name: groups.T @ g.flatten(1) for name, g in samples.items()}


def _adjoints(model: nn.Module, x: Tensor, y: Tensor) -> Named:
    """∂L/∂x_k at the input of every layer that has parameters of its own."""
    seen: Named = {}
    with _watching(model, seen), torch.enable_grad():
        loss = cross_entropy(model(x.detach().requires_grad_()), y)
        found = torch.autograd.grad(loss, list(seen.values()))
    return dict(zip(seen, found, strict=True))


def _input_adjoint(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (d0,) = torch.autograd.grad(cross_entropy(model(x), y), x)
    return d0


@contextmanager
def _watching(model: nn.Module, seen: Named) -> Iterator[None]:
    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if name in seen:
                raise ValueError(f"model calls {name} twice: it is no chain")
            seen[name] = inputs[0]

        return note

    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

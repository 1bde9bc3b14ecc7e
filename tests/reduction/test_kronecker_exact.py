"""Cases in which a Kronecker product is the second moment of the gradient, not an approximation of it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from ocnopt import OCNOpt

LR, DAMPING = 0.3, 0.05


class Paired(nn.Module):
    """The samples are all pairs of inputs and adjoints, so that the two are independent by construction."""

    def __init__(self, layer: nn.Module, x: Tensor, h: Tensor) -> None:
        super().__init__()
        self.layer = layer
        pairs = list(product(range(len(x)), range(len(h))))
        self.x = torch.stack([x[i] for i, _ in pairs])
        self.h = torch.stack([h[j] for _, j in pairs])

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.h).flatten(1).sum(1).mean()


def second_moment(model: Paired) -> Tensor:
    """E[g g^T] over the samples, weight and bias together."""
    gradients = []
    for x, h in zip(model.x, model.h, strict=True):
        loss = (model.layer(x[None]) * h).sum()
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.layer.parameters()))]))
    G = torch.stack(gradients)
    return G.T @ G / len(G)


def layer_and_shapes(kind: str) -> tuple[nn.Module, tuple[int, ...], tuple[int, ...]]:
    torch.manual_seed(0)
    if kind == "linear":
        return nn.Linear(4, 3), (4,), (3,)
    if kind == "linear without bias":
        return nn.Linear(4, 3, bias=False), (4,), (3,)
    return nn.Conv2d(2, 3, (2, 3)), (2, 2, 3), (3, 1, 1)  # the kernel fills the image: one position


@pytest.mark.parametrize("ekfac", [False, True])
@pytest.mark.parametrize(("inputs", "adjoints"), [(1, 1), (4, 3), (5, 1)])
@pytest.mark.parametrize("kind", ["linear", "linear without bias", "conv"])
def test_metric_is_the_second_moment(kind: str, inputs: int, adjoints: int, ekfac: bool) -> None:
    layer, x_shape, h_shape = layer_and_shapes(kind)
    x = torch.randn(inputs, *x_shape, dtype=torch.float64) + 0.5
    h = torch.randn(adjoints, *h_shape, dtype=torch.float64) - 0.5
    model = Paired(layer, x, h).double()
    dense = second_moment(model)
    opt = OCNOpt(
        model.parameters(), LR, model=model, curvature="kronecker", feedback="off", momentum=0.0,
        damping=DAMPING, ekfac=ekfac,
    )  # fmt: skip
    model(model.x).backward()
    direction = []
    for p in model.parameters():  # any direction: what happens to p.grad after the backward pass is honoured
        p.grad = torch.randn_like(p)
        direction.append(p.grad.flatten())
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    opt.step()
    change = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before
    metric = dense + DAMPING * torch.eye(len(dense), dtype=torch.float64)
    torch.testing.assert_close(change, -LR * torch.linalg.solve(metric, torch.cat(direction)), rtol=1e-9, atol=1e-10)

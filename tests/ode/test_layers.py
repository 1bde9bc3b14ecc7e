"""The layers that know the time compute what their authors say, and all their parts have Kronecker curvature."""

from __future__ import annotations

import pytest
import torch
from tests.ode.fields import batch
from torch import Tensor, nn

from ocnopt import OCNOpt
from ocnopt.ode import NeuralODE
from ocnopt.ode import layers as L

t = torch.tensor(0.3)


def test_concat() -> None:
    linear, x = L.ConcatLinear(3, 2), batch().float()
    assert torch.allclose(linear(t, x), linear.layer(torch.cat([torch.full((5, 1), 0.3), x], 1)))
    conv, image = L.ConcatConv2d(2, 4, padding=1), torch.randn(5, 2, 3, 3)
    assert conv.layer.weight.shape == (4, 3, 3, 3)
    assert torch.allclose(conv(t, image), conv.layer(torch.cat([torch.full((5, 1, 3, 3), 0.3), image], 1)))


def test_what_time_does_to_the_output() -> None:
    x = batch().float()
    squash, gated, shifted = L.ConcatSquashLinear(3, 2), L.SquashLinear(3, 2), L.ShiftLinear(3, 2)
    assert torch.allclose(
        squash(t, x), squash.layer(x) * torch.sigmoid(squash.gate(t.view(1))) + squash.shift(t.view(1))
    )
    assert torch.allclose(gated(t, x), gated.layer(x) * torch.sigmoid(gated.gate(t.view(1))))
    assert torch.allclose(shifted(t, x), shifted.layer(x) + shifted.shift(t.view(1)))
    conv, image = L.ConcatSquashConv2d(2, 4, padding=1), torch.randn(5, 2, 3, 3)
    gate, shift = (f(t.view(1)).view(1, 4, 1, 1) for f in (conv.gate, conv.shift))
    assert torch.allclose(conv(t, image), conv.layer(image) * gate.sigmoid() + shift, atol=1e-6)


def test_layers_in_sequence_get_the_time_if_they_know_it() -> None:
    inner = L.TimeSequential(L.ConcatLinear(3, 3), nn.Tanh())
    field, x = L.TimeSequential(inner, nn.Linear(3, 3)), batch().float()
    assert torch.equal(field(t, x), field[1](torch.tanh(inner[0](t, x))))


@pytest.mark.parametrize(
    ("field", "x"),
    [
        (lambda: L.TimeSequential(L.ConcatLinear(3, 4), nn.Tanh(), L.ConcatLinear(4, 3)), batch()),
        (lambda: L.TimeSequential(L.ConcatSquashLinear(3, 4), nn.Tanh(), L.SquashLinear(4, 3)), batch()),
        (lambda: L.TimeSequential(L.ShiftLinear(3, 3), nn.Tanh()), batch()),
        (lambda: L.TimeSequential(L.ConcatConv2d(2, 2, padding=1), nn.Tanh()), batch(5, 18).view(5, 2, 3, 3)),
        (lambda: L.TimeSequential(L.ConcatSquashConv2d(2, 2, padding=1), nn.Tanh()), batch(5, 18).view(5, 2, 3, 3)),
    ],
    ids=["concat", "squash", "shift", "conv", "squash-conv"],
)
def test_every_parameter_has_kronecker_curvature(field: type[nn.Module], x: Tensor) -> None:
    torch.manual_seed(0)
    block = NeuralODE(field().double())
    opt = OCNOpt(block.parameters(), model=block, curvature="kronecker", feedback="off")
    block(x).square().mean().backward()
    opt.step()
    assert "adaptive" not in opt.summary()
    assert all("input_factor" in opt.state[p] for n, p in block.named_parameters() if n.endswith("weight"))

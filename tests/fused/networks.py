"""A network that steps by fused kernels, and its twin that does not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.toys import state_of, values
from torch import nn

from ocnopt import OCNOpt
from ocnopt.fused import support

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

MOMENTA = {
    "none": {"momentum": 0.0},
    "average": {"momentum": 0.9},
    "uncorrected": {"momentum": 0.9, "bias_correction": False},
    "heavy ball": {"momentum": 0.8, "ema": False},
    "nesterov": {"momentum": 0.8, "ema": False, "nesterov": True},
}
DECAYS = {
    "none": {},
    "coupled": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
}


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Parameters of one number up to two chunks."""
    torch.manual_seed(0)
    n = 860 if DEVICE.type == "cuda" else 420
    net = nn.Sequential(nn.Linear(5, n), nn.Tanh(), nn.Linear(n, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 1))
    return net.to(DEVICE, dtype)


def pair(
    steps: int = 2, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, OCNOpt, nn.Module, OCNOpt]:
    """Two that have come to the same place, one of which goes on by fused kernels."""
    model = network(dtype)
    plain = OCNOpt(model.parameters(), model=model, fused=False, lr=0.03, **options)
    for i in range(steps):
        one_pass(model, i)
        plain.step()
    ours = copy.deepcopy(model)
    for module in ours.modules():  # the hooks of the other
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    fused = OCNOpt(ours.parameters(), model=ours, lr=0.03, **options)
    if steps:
        fused.load_state_dict(plain.state_dict())
    fused.param_groups[0]["fused"] = True
    return model, plain, ours, fused


def one_pass(model: nn.Module, seed: int, batch: int = 8) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 5, generator=draw).to(DEVICE, next(model.parameters()).dtype)
    model.zero_grad()
    model(x).float().add(0.3).square().mean().backward()


@contextmanager
def without_kernels() -> Iterator[None]:
    """Not even for sums, which ``fused=False`` leaves as they are."""
    support._broken = "they are not asked for"
    try:
        yield
    finally:
        support._broken = None


def found(model: nn.Module, opt: OCNOpt) -> list[Any]:
    report = opt.diagnostics
    numbers = [] if report.kernels is None else [report.kernels.K, report.kernels.u, report.w, report.s]
    change = [] if report.kernels is None else [report.predicted_change]
    return [values(model), state_of(opt), numbers, change]


def assert_same_step(seed: int = 7, steps: int = 2, **options: Any) -> None:
    model, plain, ours, fused = pair(steps, **options)
    before = values(model)
    with without_kernels():
        one_pass(model, seed)
        plain.step()
    one_pass(ours, seed)
    fused.step()
    assert not torch.equal(before[0], values(model)[0])
    # s is a difference of two inner products, each of which is rounded
    torch.testing.assert_close(found(ours, fused), found(model, plain), rtol=2e-5, atol=2e-6)


def convolutions(bias: bool = True) -> nn.Sequential:
    """Of 4×4 pixels, then of 2×2 and of one, whose kernels see padding mostly."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 7, 3, stride=2, padding=1, bias=bias),
        nn.Tanh(),
        nn.Conv2d(7, 70, 3, stride=2, padding=1, bias=bias),
        nn.Tanh(),
        nn.Conv2d(70, 90, 3, padding=1, bias=bias),
        nn.Flatten(),
        nn.Linear(90, 2),
    ]
    return nn.Sequential(*layers)


def trained(model: nn.Module, x: torch.Tensor, steps: int = 3, **options: Any) -> list[Any]:
    opt = OCNOpt(model.parameters(), model=model, lr=0.05, eps=1e-2, **options)  # of small numbers last digits differ
    for i in range(steps):
        opt.zero_grad()
        model((1 + 0.1 * i) * x).square().mean().backward()
        opt.step()
    return found(model, opt)


def images(batch: int = 6, side: int = 4) -> torch.Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1))

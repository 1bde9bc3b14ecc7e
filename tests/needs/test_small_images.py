"""Networks whose last images are a pixel or two: some weights see nothing but padding, and are left out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.toys import values
from torch import Tensor, nn

from ocnopt import Metric, OCNOpt
from ocnopt.curvature import Adaptive
from ocnopt.layers.conv import Conv


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1, bias=False), nn.Tanh()]
    layers += [nn.Conv2d(8, 8, 3, 1, 1), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def step(model: nn.Module, opt: OCNOpt, seed: int, touch: str) -> None:
    opt.zero_grad()
    torch.manual_seed(seed)
    model(torch.randn(7, 2, 4, 4).double()).square().sum(1).tanh().mean().backward()
    for p in model.parameters():
        assert p.grad is not None
        if touch == "penalty":
            p.grad += 0.1 * p.detach()
        elif touch == "behind its back":
            p.grad.data += 0.1 * p.detach()
    opt.step()


@pytest.mark.parametrize("touch", ["", "penalty", "behind its back"])
@pytest.mark.parametrize("feedback", ["linear", "nonlinear"])
@pytest.mark.parametrize(
    "options",
    [
        {"curvature": "identity"},
        {"curvature": "identity", "momentum": 0.0},
        {"curvature": "adaptive"},
        {"curvature": "adaptive", "weight_decay": 0.1, "eps": 0.0},
        {"curvature": "adaptive", "maximize": True, "bias_correction": False},
        {"curvature": "kronecker"},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["gram", "explicit"])
def test_the_same_steps(
    form: str, options: dict[str, Any], feedback: str, touch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if all taps saw something."""
    found: list[list[Tensor]] = []
    monkeypatch.setattr(Conv, "prefers_gram", lambda *_: form == "gram")
    start = net()
    for trimmed in (True, False):
        model = copy.deepcopy(start)
        opt = OCNOpt(model.parameters(), 0.05, model=model, rank=3, feedback=feedback, **options)
        with monkeypatch.context() as patch:
            if not trimmed:
                patch.setattr(Conv, "_geometry_of", lambda *_: None)
            for seed in range(4):
                step(model, opt, seed, touch)
        found.append(values(model))
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-10)


def test_nothing_is_stored_of_what_is_zero() -> None:
    model = net()
    opt = OCNOpt(model.parameters(), 0.05, model=model, rank=3, curvature="adaptive", feedback="linear")
    opt.zero_grad()
    model(torch.randn(7, 2, 4, 4).double()).square().mean().backward()
    assert opt._tape is not None
    kept = {record.name: record.columns["weight"].shape[-2:] for record in opt._tape.records if record.name in "035"}
    assert kept == {"0": (3, 3), "3": (2, 2), "5": (1, 1)}


def test_a_kernel_that_sees_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2, padding=3, dilation=6), nn.Flatten(), nn.Linear(3, 2))
    opt = OCNOpt(model.parameters(), 0.05, model=model, rank=3)
    before = values(model)
    model(torch.randn(6, 2, 1, 1)).square().mean().backward()
    opt.step()
    assert torch.equal(values(model)[0], before[0])
    assert not torch.equal(values(model)[1], before[1])


def test_a_metric_of_somebodys_own_gets_whole_gradients() -> None:
    """It need not know of parts, whatever class it comes from."""

    class Half(Metric):
        def solve(self, vectors: Sequence[Tensor]) -> list[Tensor]:
            assert {v.shape[-2:] for v in vectors if v.dim() >= 4} <= {(3, 3)}
            return [v / 2 for v in vectors]

    class Halving(Adaptive):
        def measure(self, bucket: Any, a: Tensor | None) -> Any:
            super().measure(bucket, a)
            return Half()

    model = net()
    opt = OCNOpt(model.parameters(), 0.05, model=model, rank=3, curvature=Halving())
    for seed in range(3):
        step(model, opt, seed, "")


@pytest.mark.parametrize("options", [{}, {"momentum": 0.0}, {"feedback": "nonlinear"}, {"rank": 3}], ids=str)
def test_weights_in_another_order(options: dict[str, Any]) -> None:
    found = []
    for order in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layers = nn.Conv2d(2, 6, 3, 2, 1), nn.Tanh(), nn.Conv2d(6, 8, 3, 2, 1), nn.Flatten(), nn.Linear(8, 3)
        model = nn.Sequential(*layers).double().to(memory_format=order)  # type: ignore[call-overload]
        opt = OCNOpt(model.parameters(), 0.05, model=model, **options)
        for seed in range(3):
            step(model, opt, seed, "")
        found.append([p.contiguous() for p in values(model)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)

"""Two trainings, one with steps from graphs of themselves and one without."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tests.toys import batches, mlp, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from ocnopt import OCNOpt


class Residual(nn.Module):
    """A convolution, a block around which the input is led, and a batch norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.block, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 3)
        self.scale = 1.0
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = relu(self.norm(self.first(x))) + 0.1 * self.mean
        self.mean.mul_(0.5).add_(0.5 * h.detach().mean())  # a second pass must find it as the first one did
        h = h + self.scale * relu(self.block(h))
        out: Tensor = self.last(h.mean((2, 3)))
        return out


def _images(n: int, size: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, size, 1, 5, 5, generator=generator, dtype=torch.float64)
    return list(zip(x, torch.randint(3, (n, size), generator=generator), strict=True))


def data(kind: str, n: int, size: int = 6, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    found = batches(n, size=size) if kind == "chain" else _images(n, size)
    return found if device == "cpu" else [(x.to(device, torch.float32), y.to(device)) for x, y in found]


def make(kind: str, device: str = "cpu", **options: Any) -> tuple[nn.Module, OCNOpt]:
    torch.manual_seed(0)
    model = mlp() if kind == "chain" else Residual().double()
    if device != "cpu":
        model = model.to(device, torch.float32)
    return model, OCNOpt(model.parameters(), 0.05, model=model, **options)


def train(model: nn.Module, opt: OCNOpt, seen: Iterable[tuple[Tensor, Tensor]]) -> list[str | None]:
    reasons = []
    for x, y in seen:
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        opt.step()
        reasons.append(opt._replays.reason)
    return reasons


def both(kind: str, seen: Iterable[tuple[Tensor, Tensor]], **options: Any) -> tuple[Any, Any, list[str | None]]:
    """A training with replays, and one without."""
    ours, theirs = make(kind, **options), make(kind, **options, graphed=False)
    reasons = train(*ours, seen)
    train(*theirs, seen)
    return ours, theirs, reasons


def assert_same(ours: Any, theirs: Any, rtol: float = 1e-7, atol: float = 1e-10) -> None:
    torch.testing.assert_close(values(ours[0]), values(theirs[0]), rtol=rtol, atol=atol)
    for mine, other in zip(ours[1].state.values(), theirs[1].state.values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=atol)


GAMES: list[dict[str, Any]] = [
    {"curvature": curvature, "feedback": feedback, "rank": rank}
    for curvature in ("identity", "adaptive", "kronecker")
    for feedback in ("off", "linear", "nonlinear")
    for rank in (1, 3, "full")
    if feedback != "off" or rank == 1
]
GAMES += [
    {"bellman": "paper", "feedback": "nonlinear"},
    {"game": "noncooperative", "feedback": "linear"},
    {"state": "accumulated", "feedback": "nonlinear"},
    {"feedback": "nonlinear", "weight_decay": 0.1, "decoupled_weight_decay": True},
    {"feedback": "nonlinear", "maximize": True},
    {"curvature": "kronecker", "refresh_every": 12, "factor_every": 2},
    {"curvature": "kronecker", "refresh_every": 4, "feedback": "nonlinear"},
]

NONLINEAR: dict[str, Any] = {"feedback": "nonlinear"}


def warm(kind: str, **options: Any) -> tuple[tuple[nn.Module, OCNOpt], tuple[nn.Module, OCNOpt]]:
    """Two trainings, the first of which has come to replays."""
    ours, theirs, reasons = both(kind, data(kind, 13), **options)
    assert reasons[-1] is None, reasons
    return ours, theirs


def tuned(model: nn.Module, **options: Any) -> tuple[nn.Module, OCNOpt]:
    model = model.double()
    return model, OCNOpt(model.parameters(), 0.05, model=model, **NONLINEAR, **options)

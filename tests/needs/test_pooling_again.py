"""A second pass finds maxima without their places: the same numbers in the same layout, by other operations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ocnopt import OCNOpt
from ocnopt.again import Again


def options() -> list[dict[str, object]]:
    every = product((1, 2, 3, (3, 2)), (None, 1, 2, (1, 3)), (0, 1), (1, 2), (False, True))
    names = "kernel_size", "stride", "padding", "dilation", "ceil_mode"
    return [dict(zip(names, values, strict=True)) for values in every if values[2] == 0 or values[0] in (2, 3)]


@pytest.mark.parametrize("shape", [(2, 3, 9, 8), (3, 7, 10), (2, 1, 8, 9)])
def test_the_numbers_of_torch(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[..., 2, 3] = torch.nan
    x[..., 5, 5] = -torch.inf
    for each in options():
        with torch.no_grad():
            expected = F.max_pool2d(x, **each)
            with Again():
                found = F.max_pool2d(x, **each), nn.MaxPool2d(**each)(x)
        for out in found:
            torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{each}: {m}")  # noqa: B023
            assert out.stride() == expected.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_three_dimensions_and_other_numbers(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 6, 7, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad(), Again():
        found = F.max_pool3d(x, (2, 3, 3), (2, 1, 2), (1, 0, 1), ceil_mode=True)
    assert torch.equal(found, F.max_pool3d(x, (2, 3, 3), (2, 1, 2), (1, 0, 1), ceil_mode=True))


class Seen(TorchDispatchMode):
    """What runs in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("what", "pool"),
    [
        ("gradients", lambda x: F.max_pool2d(x.requires_grad_(), 2)),
        ("places", lambda x: F.max_pool2d(x, 2, return_indices=True)[1]),
        ("channels last", lambda x: F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2)),
        ("a layout of its own", lambda x: F.max_pool2d(x.mT, 2)),
    ],
)
def test_what_is_left_to_torch(what: str, pool: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(2, 3, 8, 8)
    with torch.set_grad_enabled(what == "gradients"):
        expected = pool(x)
        with Again(), Seen() as seen:
            found = pool(x)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert "max_pool2d_with_indices" in seen.names


class Branching(nn.Module):
    """No chain: it runs stage by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(2, 4, 3, padding=1), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu() + self.b(x).tanh()
        out: Tensor = self.c(F.max_pool2d(h, 2).flatten(1))
        return out


def chain() -> nn.Module:
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("make", [chain, Branching])
def test_steps(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> tuple[list[Tensor], list[str]]:
        torch.manual_seed(0)
        model = make()
        opt = OCNOpt(model.parameters(), model=model, lr=0.1, feedback="nonlinear")
        names = []
        for _ in range(4):
            x, y = torch.randn(6, 2, 8, 8), torch.randint(3, (6,))
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with Seen() as seen:
                opt.step()
            names = seen.names
        return [p.detach().clone() for p in model.parameters()], names

    ours, names = trained()
    monkeypatch.setattr("ocnopt.again.QUICKER", {})
    monkeypatch.setattr("ocnopt.games.program.QUICKER", {})
    theirs, others = trained()
    assert all(map(torch.equal, ours, theirs))
    assert "max_pool2d_with_indices" in others
    assert "max_pool2d_with_indices" not in names


def test_only_the_model_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the optimizer does between its layers."""
    looked_at = set()
    original = Again.__torch_function__

    def look(self: Again, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        looked_at.add(func)
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(Again, "__torch_function__", look)
    torch.manual_seed(0)
    model = chain()
    opt = OCNOpt(model.parameters(), model=model, lr=0.1, feedback="nonlinear")
    for _ in range(3):
        opt.zero_grad()
        F.cross_entropy(model(torch.randn(6, 2, 8, 8)), torch.randint(3, (6,))).backward()
        opt.step()
    assert {torch.conv2d, F.relu, F.linear} <= looked_at
    assert not {torch.dot, Tensor.reshape, Tensor.addcmul_, Tensor.sub} & looked_at

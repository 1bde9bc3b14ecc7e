"""How many copies of the parameters a step holds at a time, beyond gradients and state."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from tests.toys import backward, batches
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ocnopt import OCNOpt
from ocnopt.multi import _chunks, _few_launches, inner
from ocnopt.readings import products


class Peak(TorchDispatchMode):
    """The most bytes that are held at a time of what operations have made."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.most = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self._known | before:
                self._take(t.untyped_storage())
        return out

    def _take(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.held += size
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self._give_back, key, size)

    def _give_back(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


#: masked gradients; what is planned; a metric, gradients in it; a copy to put back
COPIES = {
    ("identity", "linear"): 1,
    ("adaptive", "linear"): 3,
    ("identity", "nonlinear"): 3,
    ("adaptive", "nonlinear"): 7,
}


@pytest.mark.parametrize(("curvature", "feedback"), COPIES)
def test_copies_of_the_parameters(curvature: str, feedback: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 3)).double()
    opt = OCNOpt(model.parameters(), 1e-3, model=model, curvature=curvature, feedback=feedback)
    (x, y), _ = batches(2)
    for _ in range(2):
        backward(model, x, y)
        opt.step()
        opt.zero_grad()
    backward(model, x, y)
    with Peak() as peak:
        opt.step()
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert peak.most / parameters < COPIES[curvature, feedback] + 0.25


def test_products_are_written_down_a_few_at_a_time() -> None:
    assert _chunks([3, 3, 3, 10, 1, 1], 6) == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert _chunks([10], 6) == [(0, 1)]
    xs, ys = ([torch.randn(n, dtype=torch.float64) for n in (3, 1500, 3, 4000, 1, 1)] for _ in range(2))
    for chunk in (1, 6, 2000, 10**6):
        torch.testing.assert_close(_few_launches(xs, ys, chunk), inner(xs, ys))


def test_products_of_rows_are_written_down_some_at_a_time() -> None:
    x, y = torch.randn(2, 70, 2**16).double()
    with Peak() as peak:
        found = products(x, y)
    torch.testing.assert_close(found, torch.linalg.vecdot(x, y))
    assert peak.most < x.nbytes / 8


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class Listening(TorchDispatchMode):
    """How many of the adjoints at the outputs of convolutions are still there while a step convolves?"""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.told: list[weakref.ref[torch.UntypedStorage]] = []
        self.there: list[int] = []
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(lambda _module, _args, out: self._listen(out))

    def _listen(self, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda h: self.told.append(weakref.ref(h.untyped_storage())))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.there.append(sum(each() is not None for each in self.told))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chain", [True, False])
def test_a_second_pass_finds_room(chain: bool) -> None:
    """What group gradients were made of is gone when the network runs again."""
    torch.manual_seed(0)
    second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh())
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), second if chain else Residual(second), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(256, 3))
    opt = OCNOpt(model.parameters(), 1e-3, model=model, curvature="identity", feedback="nonlinear", rank=2)
    listening = Listening(model)
    for _ in range(4):
        listening.told.clear()
        listening.there.clear()
        opt.zero_grad()
        model(torch.randn(6, 1, 8, 8)).square().sum().backward()
        assert len(listening.told) == 2
        with listening:
            opt.step()
    assert listening.there == [0, 0]

"""Gradients of convolutions tap by tap are those of autograd."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.layers.oracle import adapter_of, brute_force, call_of
from torch import Tensor, nn
from torch.autograd import forward_ad

from ocnopt import OCNOpt
from ocnopt.fused.native import binding, taps
from ocnopt.groups import Groups
from ocnopt.layers import Call, conv
from ocnopt.layers.base import spread
from ocnopt.layers.conv import Conv
from ocnopt.layers.ways import Way, suits_taps

pytestmark = pytest.mark.skipif(isinstance(binding.library(), str), reason=str(binding.library()))

DIMENSIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@pytest.fixture
def by_tap(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Whatever the rule of thumb and the processor would choose; what has been found."""
    found: list[Tensor] = []
    real = taps.gradients

    def noted(*args: Any) -> Tensor:
        found.append(real(*args))
        return found[-1]

    monkeypatch.setattr(taps, "_LANES", 4)
    monkeypatch.setattr(taps, "gradients", noted)
    monkeypatch.setattr(conv, "suits_taps", lambda groups, *_: groups.rank > 1)
    return found


@st.composite
def calls(draw: st.DrawFn) -> Call:
    space = draw(st.integers(1, 3))
    sizes, kernel, stride, dilation, padding = (
        tuple(draw(st.integers(*bounds)) for _ in range(space)) for bounds in ((1, 5), (1, 4), (1, 3), (1, 2), (0, 3))
    )
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    assume(all(n + 2 * p >= r for n, p, r in zip(sizes, padding, reach, strict=True)))
    channels = draw(st.sampled_from([(1, 1), (3, 9), (33, 8), (64, 5), (40, 17)]))
    layer = DIMENSIONS[space](*channels, kernel, stride, padding, dilation, bias=draw(st.booleans()))
    return call_of(layer, torch.randn(5, channels[0], *sizes))


def check(call: Call, groups: Groups) -> None:
    adapter = adapter_of(call.module)
    assert isinstance(adapter, Conv)
    assert adapter._way(call, groups) is Way.TAPS
    exact = Call(copy.deepcopy(call.module).double(), (call.x.double(),), {}, call.h.double())
    expected = brute_force(exact, groups)["weight"]
    part = adapter.part_gradients(call, groups)["weight"]
    whole = adapter.group_gradients(call, groups)["weight"]
    for found in (spread(part, adapter.weight_part(call), call.module.weight.shape), whole):  # type: ignore[arg-type]
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("by_tap")
@settings(max_examples=80, deadline=None)
@given(calls(), st.sampled_from([2, 3, 5]))
def test_they_are_those_of_autograd(call: Call, rank: int) -> None:
    check(call, Groups(5, rank))


@pytest.mark.usefixtures("by_tap")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"padding": "same", "kernel_size": (4, 3)},
        {"padding": "valid"},
        {"padding": (1, 2), "padding_mode": "reflect"},
        {"padding": "same", "dilation": 2, "padding_mode": "circular"},
    ],
    ids=str,
)
@pytest.mark.parametrize("last", [False, True])
def test_padding_of_any_kind(options: dict[str, Any], last: bool) -> None:
    x = torch.randn(6, 5, 6, 7)
    layer = nn.Conv2d(5, 9, **{"kernel_size": 3, **options})
    check(call_of(layer, x.to(memory_format=torch.channels_last) if last else x), Groups(6, 4))


@pytest.mark.parametrize("threads", [1, 3])
def test_many_threads_add_up_in_the_same_order(threads: int, by_tap: list[Tensor]) -> None:
    call, before = call_of(nn.Conv2d(64, 64, 3, padding=1), torch.randn(8, 64, 4, 4)), torch.get_num_threads()
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            check(call, Groups(8, 2))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, by_tap[0]) for each in by_tap)


def test_another_device_by_default(by_tap: list[Tensor]) -> None:
    call = call_of(nn.Conv2d(64, 8, 3, padding=1), torch.randn(6, 64, 4, 4))
    with torch.device("meta"):
        adapter_of(call.module).group_gradients(call, Groups(6, 4))
    assert len(by_tap) == 1
    check(call, Groups(6, 4))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_what_is_left_to_libraries(by_tap: list[Tensor]) -> None:
    """Groups of channels, other precisions, transposed convolutions, and gradients that are differentiated again."""
    image = torch.randn(4, 4, 5, 5)
    layers = [nn.Conv2d(4, 4, 3, groups=2), nn.ConvTranspose2d(4, 4, 3), nn.Conv2d(4, 4, 3).double()]
    for layer in layers:
        call = call_of(layer, image.to(layer.weight.dtype))
        adapter_of(layer).group_gradients(call, Groups(4, 2))
    call = call_of(nn.Conv2d(4, 4, 3), image)
    call.h.requires_grad_()
    G = adapter_of(call.module).group_gradients(call, Groups(4, 2))["weight"]
    G.square().sum().backward()
    assert call.h.grad is not None

    def of(h: Tensor) -> Tensor:
        return adapter_of(layers[0]).group_gradients(Call(call.module, call.args, {}, h), Groups(4, 2))["weight"]

    with forward_ad.dual_level():
        dual = of(forward_ad.make_dual(call.h.detach(), torch.ones_like(call.h)))
        assert forward_ad.unpack_dual(dual).tangent is not None
    torch.vmap(of)(call.h.detach()[None])
    assert not by_tap


@pytest.mark.parametrize(
    ("rank", "x", "h", "expected"),
    [
        (8, (128, 64, 8, 8), (128, 64, 8, 8), True),
        (1, (128, 64, 8, 8), (128, 64, 8, 8), False),  # the layer's own gradient
        (8, (128, 3, 8, 8), (128, 64, 8, 8), False),
        (8, (128, 64, 16, 16), (128, 64, 8, 8), False),
        (4, (256, 64, 8, 8), (256, 64, 8, 8), False),  # a group is work enough
    ],
)
def test_when(rank: int, x: tuple[int, ...], h: tuple[int, ...], expected: bool) -> None:
    assert suits_taps(Groups(x[0], rank), x, h) is expected


@pytest.mark.parametrize("feedback", ["linear", "nonlinear"])
def test_steps_are_the_same(by_tap: list[Tensor], monkeypatch: pytest.MonkeyPatch, feedback: str) -> None:
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.Tanh(), nn.Conv2d(32, 8, 3, 1, 1), nn.Flatten(), nn.Linear(32, 2)
        )
        opt = OCNOpt(model.parameters(), model=model, lr=0.1, rank=3, curvature="identity", feedback=feedback)
        with monkeypatch.context() as patch:
            if not ours:
                patch.setattr(taps, "fit", lambda *_: False)
            for _ in range(3):
                opt.zero_grad()
                model(torch.randn(6, 3, 4, 4)).square().mean().backward()
                opt.step()
        found.append([p.detach().clone() for p in model.parameters()])
    assert len(by_tap) == 6  # two layers, three steps
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)

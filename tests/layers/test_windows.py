"""Taps that see nothing but padding are left out, and nothing else is; windows of small images need not be formed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.layers.oracle import adapter_of, assert_same, brute_force, call_of
from torch import Tensor, nn

from ocnopt.groups import Groups
from ocnopt.layers import Call, outer, windows
from ocnopt.layers.base import spread
from ocnopt.layers.conv import Conv, _axes
from ocnopt.layers.ways import Way

DIMENSIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def axes_of(call: Call) -> Any:
    layer: Any = call.module
    return _axes(layer, call.x, layer.padding, call.h.shape[2:])


@st.composite
def calls(draw: st.DrawFn, blocks: int = 1) -> Call:
    space = draw(st.integers(1, 2))
    sizes, kernel, stride, dilation, padding = (
        tuple(draw(st.integers(*bounds)) for _ in range(space)) for bounds in ((1, 3), (1, 4), (1, 3), (1, 2), (0, 3))
    )
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    assume(all(n + 2 * p >= r for n, p, r in zip(sizes, padding, reach, strict=True)))
    layer = DIMENSIONS[space](2 * blocks, 4 * blocks, kernel, stride, padding, dilation, blocks).double()
    return call_of(layer, torch.randn(5, 2 * blocks, *sizes, dtype=torch.float64))


@settings(max_examples=60, deadline=None)
@given(calls(), st.sampled_from([Way.IN_TURN, Way.WINDOWS]), st.sampled_from([1, 2]))
def test_outside_of_its_part_a_weight_has_no_gradient(call: Call, way: Way, rank: int) -> None:
    adapter, groups = adapter_of(call.module), Groups(5, rank)
    assert isinstance(adapter, Conv)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter, "_way", lambda *_: way, raising=False)
        found = adapter.part_gradients(call, groups)
        whole = adapter.group_gradients(call, groups)
    expected, part = brute_force(call, groups), adapter.parts(call).get("weight", ())
    for name, G in expected.items():
        assert_same(whole[name], G)
    assert_same(spread(found["weight"], part, expected["weight"].shape[1:]), expected["weight"])
    for axis, own in enumerate(part[2:], start=3) if expected["weight"].any() else ():  # no edge could be left out
        for edge in (own.start, own.stop - 1):
            assert expected["weight"].select(axis, edge).abs().sum() > 0


def test_elsewhere_than_on_a_cpu_gradients_are_whole() -> None:
    layer, x = nn.Conv2d(2, 4, 3, padding=1), torch.randn(5, 2, 1, 1)
    call, adapter = call_of(layer, x), adapter_of(layer)
    assert adapter.parts(call)
    there = Call(layer, (call.x.to("meta"),), {}, call.h.to("meta"))
    assert not adapter.parts(there)
    assert adapter.part_gradients(there, Groups(5, 2))["weight"].shape == (2, 4, 2, 3, 3)


@settings(max_examples=40, deadline=None)
@given(calls())
def test_what_some_taps_see(call: Call) -> None:
    axes = axes_of(call)
    seen = windows.sight(axes)
    some, every = windows.windows(call.x, axes, 1, seen), windows.windows(call.x, axes, 1)
    kernel = [axis.kernel for axis in axes]
    assert_same(some.unflatten(-1, (2, *seen.kernel)), every.unflatten(-1, (2, *kernel))[..., *seen.taps])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 2).flatmap(calls))
def test_products_of_pixels(call: Call) -> None:
    adapter, axes, blocks = adapter_of(call.module), axes_of(call), call.module.groups
    assert isinstance(adapter, Conv)
    factors = adapter.factors(call)
    assert_same(windows.gram(call.x, call.h, axes, blocks), outer.gram(factors.x, factors.h))  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "by_pixels"), [(1, False), (2, True), (9, False)])
def test_the_cheaper_products(size: int, by_pixels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(nn.Conv2d(64, 64, 3, padding=1, bias=False), torch.randn(4, 64, size, size))
    adapter, asked, form = adapter_of(call.module), [], windows.gram
    monkeypatch.setattr(windows, "gram", lambda *given: (asked.append(0), form(*given))[1])
    found = adapter.grams(call)["weight"]
    each = brute_force(call, Groups(4, 4))["weight"].flatten(1)
    torch.testing.assert_close(found, each @ each.T, rtol=1e-4, atol=1e-2)
    assert bool(asked) is by_pixels


def test_a_direction_is_read_where_it_matters() -> None:
    call = call_of(nn.Conv2d(3, 4, 3, padding=1, bias=False).double(), torch.randn(5, 3, 1, 1).double())
    direction = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    each: Tensor = brute_force(call, Groups(5, 5))["weight"].flatten(1)
    assert_same(adapter_of(call.module).project(call, {"weight": direction}), each @ direction.flatten())

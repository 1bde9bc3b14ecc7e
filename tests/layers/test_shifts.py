"""Products of an image with shifted copies of itself against the windows that they stand for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.layers.oracle import adapter_of, assert_same, call_of
from torch import Tensor, nn

from ocnopt.layers import outer, shifts, windows


def plain(call: Any) -> Tensor:
    """Σ w w^T over windows that are formed."""
    x = adapter_of(call.module).factors(call)
    v = x.h if call.module.transposed else x.x
    return torch.einsum("nbti,nbtj->bij", v, v)


def geometry_of(call: Any) -> tuple[Tensor, list[shifts.Axis]]:
    module = call.module
    x, positions = (call.h, call.x.shape[2:]) if module.transposed else (call.x, call.h.shape[2:])
    each = zip(x.shape[2:], positions, module.kernel_size, module.stride, module.dilation, module.padding, strict=True)
    return x, [shifts.Axis(*one) for one in each]


@st.composite
def calls(draw: st.DrawFn) -> Any:
    dims, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
    of_axes = lambda low, high: draw(st.tuples(*[st.integers(low, high)] * dims))  # noqa: E731
    space, kernel, stride, dilation, padding = (of_axes(*r) for r in ((2, 7), (1, 4), (1, 3), (1, 3), (0, 3)))
    options = {"stride": stride, "dilation": dilation, "padding": padding, "groups": groups}
    sizes = zip(space, padding, dilation, kernel, stride, strict=True)
    if draw(st.booleans()):
        assume(all((n - 1) * s + d * (k - 1) + 1 > 2 * p for n, p, d, k, s in sizes))
        kind = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]
    else:
        assume(all(n + 2 * p >= d * (k - 1) + 1 for n, p, d, k, _ in sizes))
        kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    channels = groups * draw(st.integers(1, 2))
    x = torch.randn(3, channels, *space, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return call_of(kind(channels, groups, kernel, **options).double(), x)


@settings(max_examples=200, deadline=None)
@given(call=calls(), shifted=st.integers(0, 2), piece=st.sampled_from([1, 1 << 20]))
def test_any_number_of_shifted_axes(call: Any, shifted: int, piece: int) -> None:
    x, axes = geometry_of(call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shifts, "cheapest", lambda *_: min(shifted, len(axes)))
        patch.setattr(outer, "CACHED", piece)
        assert_same(shifts.outer(x, axes, call.module.groups), plain(call))


def test_a_kernel_that_never_reaches_the_image() -> None:
    """Both pixels of the kernel are in the padding at every position but one."""
    axes = [shifts.Axis(size=1, positions=1, kernel=2, stride=1, dilation=2, padding=1)]
    assert shifts.spans(axes[0]) == ()
    assert_same(shifts.outer(torch.ones(2, 1, 1, dtype=torch.float64), axes, 1), torch.zeros(1, 2, 2).double())


def test_fewer_products_than_windows() -> None:
    """A kernel of 3 has 9 pairs of pixels, 81 in the plane: 5 distances and half of 25 are enough."""
    axis = shifts.Axis(size=28, positions=28, kernel=3, stride=1, dilation=1, padding=1)
    assert len({span.distance for span in shifts.spans(axis)}) == 5
    chosen = shifts.combinations((axis, axis))
    assert len({tuple(span.distance for span in c) for c in chosen}) == 13
    lines = sum(one.length * other.length for one, other in chosen)
    assert lines < 13 * 28**2


@pytest.mark.parametrize(
    ("channels", "size", "kernel", "shifted"), [(32, 28, 3, 2), (1, 28, 3, 1), (64, 16, 1, 0), (3, 32, 7, 1)]
)
def test_the_cheapest_way_on_a_cpu(channels: int, size: int, kernel: int, shifted: int) -> None:
    axis = shifts.Axis(size, size, kernel, 1, 1, kernel // 2)
    assert shifts.cheapest((axis, axis), 128, 1, channels, "cpu") == shifted


@pytest.mark.parametrize(
    ("channels", "size", "batch", "shifted"),
    [(64, 8, 128, 0), (128, 4, 128, 0), (512, 1, 128, 0), (32, 28, 128, 0), (128, 56, 64, 1), (512, 14, 64, 2)],
)
def test_the_cheapest_way_on_a_gpu(channels: int, size: int, batch: int, shifted: int) -> None:
    """One product of windows is one launch, however much it multiplies; of large images it multiplies too much."""
    axis = shifts.Axis(size, size, 3, 1, 1, 1)
    assert shifts.cheapest((axis, axis), batch, 1, channels, "cuda") == shifted


@pytest.mark.parametrize("first", [(9, 9, 3, 1, 1, 1), (11, 4, 5, 2, 1, 1), (10, 3, 3, 3, 2, 1), (1, 1, 2, 1, 2, 1)])
@pytest.mark.parametrize("others", [(), ((8, 6, 3, 1, 1, 0),), ((7, 4, 2, 2, 1, 1),)])
def test_the_price_of_combinations_without_forming_them(first: Any, others: Any) -> None:
    axes = tuple(shifts.Axis(*each) for each in (first, *others))
    every = shifts.combinations(axes)
    lines = sum(math.prod(span.length for span in chosen) for chosen in every)
    assert shifts._totals(axes) == (len(every), lines, sum(chosen[0].length for chosen in every))
    assert shifts._totals(()) == (1, 1, 1)


@pytest.mark.parametrize(
    ("module", "space"),
    [(nn.Conv2d(3, 2, 32, 32), (64, 64)), (nn.Conv1d(1, 8, 400, 160), (4000,)), (nn.Conv1d(1, 8, 400), (800,))],
    ids=["patches", "long windows", "long windows that overlap"],
)
def test_large_kernels_and_patches_are_unfolded(
    module: nn.Module, space: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their pixels make too many pairs to think about."""
    monkeypatch.setattr(shifts, "spans", None)
    call = call_of(module.double(), torch.randn(2, module.in_channels, *space, dtype=torch.float64))
    x, axes = geometry_of(call)
    assert_same(shifts.outer(x, axes, 1), plain(call))


def test_windows_are_not_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor without a bias needs none of them."""
    call = call_of(nn.Conv2d(8, 4, 3, padding=1, bias=False), torch.randn(4, 8, 9, 9))
    monkeypatch.setattr(windows, "windows", None)
    adapter = adapter_of(call.module)
    assert adapter.kronecker_sums(call)[0].shape == (1, 72, 72)
    assert adapter.kronecker_gradients(call).shape == (4, 1, 4, 72)

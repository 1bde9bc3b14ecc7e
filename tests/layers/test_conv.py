from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.layers.oracle import adapter_of, assert_same, brute_force, call_of, check
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ocnopt.groups import Groups
from ocnopt.layers import conv, find, ways, windows

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def images(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[way for way in ways.Way if way is not ways.Way.TAPS], ids=lambda way: way.name)
def _every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways to form group gradients, whatever the rule of thumb would choose; of float64."""
    monkeypatch.setattr(conv, "way", lambda *_: request.param)


@pytest.mark.usefixtures("_every_way")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"stride": (2, 1), "padding": (1, 0)},
        {"dilation": (1, 2), "padding": 2},
        {"groups": 2, "padding": 1, "stride": 2},
        {"groups": 4},
        {"padding": "valid"},
        {"padding": "same", "dilation": (2, 1)},
        {"padding": "same", "kernel_size": (2, 4), "groups": 2},
        *({"padding": (1, 2), "padding_mode": m} for m in ("reflect", "replicate", "circular")),
        *({"padding": "same", "kernel_size": (4, 3), "padding_mode": m} for m in ("reflect", "circular")),
        {"padding": "valid", "padding_mode": "reflect"},
    ],
    ids=str,
)
def test_conv2d_options(options: dict[str, Any]) -> None:
    options = {"kernel_size": (2, 3), **options}
    check(nn.Conv2d(4, 8, **options).double(), images(5, 4, 6, 7))


@pytest.mark.usefixtures("_every_way")
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kinds", [CONV, TRANSPOSED], ids=["conv", "transposed"])
def test_all_dimensions(dims: int, kinds: dict[int, type[nn.Module]]) -> None:
    layer = kinds[dims](2, 4, 3, stride=2, padding=1, groups=2)
    check(layer.double(), images(5, 2, *[5, 4, 5][:dims]))


@pytest.mark.usefixtures("_every_way")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"stride": (2, 1), "padding": (1, 0)},
        {"stride": 3, "output_padding": (2, 1)},
        {"dilation": (3, 2), "output_padding": (2, 1)},  # more output padding than stride
        {"groups": 2, "stride": 2, "padding": 1, "output_padding": 1},
        {"groups": 4, "dilation": 2},
    ],
    ids=str,
)
def test_transposed_options(options: dict[str, Any]) -> None:
    check(nn.ConvTranspose2d(4, 8, (2, 3), **options).double(), images(5, 4, 4, 3))


def test_output_size_of_the_call() -> None:
    layer = nn.ConvTranspose2d(3, 2, 3, stride=2).double()
    check(layer, images(4, 3, 3, 4), output_size=(8, 9))
    check(layer, images(4, 3, 3, 4), [7, 10])


def test_bias_of_transposed_is_not_in_the_block() -> None:
    layer = nn.ConvTranspose1d(2, 3, 2)
    assert adapter_of(layer).kronecker_names(layer) == ("weight",)
    plain = nn.Conv1d(2, 3, 2)
    assert adapter_of(plain).kronecker_names(plain) == ("weight", "bias")


def test_blocks_are_channel_groups() -> None:
    layer = nn.Conv2d(4, 6, (2, 3), groups=2).double()
    call = call_of(layer, images(5, 4, 6, 7))
    inputs = adapter_of(layer).kronecker_inputs(call)
    assert inputs.x.shape == (5, 2, 25, 2 * 6 + 1)
    assert inputs.h.shape == (5, 2, 25, 3)
    assert_same(inputs.x[..., -1], torch.ones(5, 2, 25, dtype=torch.float64))


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, Any]:
    dims = draw(st.integers(1, 2))
    small = st.tuples(*[st.integers(1, 3)] * dims)
    groups = draw(st.sampled_from([1, 2, 3]))
    return {
        "dims": dims,
        "channels": (groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))),
        "space": draw(st.tuples(*[st.integers(3, 7)] * dims)),
        "kernel_size": draw(small),
        "stride": draw(small),
        "dilation": draw(small),
        "padding": draw(st.tuples(*[st.integers(0, 2)] * dims)),
        "groups": groups,
        "bias": draw(st.booleans()),
    }


BATCHES = {"batch": st.integers(1, 6), "rank": st.integers(1, 8)}


@settings(max_examples=150, deadline=None)
@given(geometry=geometries(), mode=st.sampled_from(["zeros", "replicate", "circular", "reflect"]), **BATCHES)
def test_conv_geometry(geometry: dict[str, Any], mode: str, batch: int, rank: int) -> None:
    dims, channels, space = (geometry.pop(n) for n in ("dims", "channels", "space"))
    sizes = zip(space, geometry["padding"], geometry["dilation"], geometry["kernel_size"], strict=True)
    assume(all(n + 2 * p >= d * (k - 1) + 1 for n, p, d, k in sizes))
    layer = CONV[dims](*channels, padding_mode=mode, **geometry)
    check(layer.double(), images(batch, channels[0], *space), ranks=[rank])


@settings(max_examples=150, deadline=None)
@given(geometry=geometries(), extra=st.tuples(*[st.integers(0, 2)] * 2), **BATCHES)
def test_transposed_geometry(geometry: dict[str, Any], extra: tuple[int, int], batch: int, rank: int) -> None:
    dims, channels, space = (geometry.pop(n) for n in ("dims", "channels", "space"))
    names = ("padding", "dilation", "kernel_size", "stride")
    sizes = list(zip(space, *(geometry[n] for n in names), extra[:dims], strict=True))
    assume(all((n - 1) * s + d * (k - 1) + 1 + e > 2 * p for n, p, d, k, s, e in sizes))
    assume(all(e < max(s, d) for _, _, d, _, s, e in sizes))
    layer = TRANSPOSED[dims](*channels, output_padding=extra[:dims], **geometry)
    check(layer.double(), images(batch, channels[0], *space), ranks=[rank])


@pytest.mark.parametrize("channels", [(8, 16), (3, 16)], ids=["folded", "in turn"])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_float32(kind: type[nn.Module], channels: tuple[int, int]) -> None:
    """oneDNN's kernels, which float64 does not use."""
    call = call_of(kind(*channels, 3, stride=2, padding=1), images(7, channels[0], 9, 8).float())
    with torch.no_grad():
        actual = adapter_of(call.module).group_gradients(call, Groups(7, 3))
    for name, expected in brute_force(call, Groups(7, 3)).items():
        torch.testing.assert_close(actual[name], expected, rtol=1e-4, atol=1e-4)


def test_channels_last() -> None:
    x = images(5, 4, 6, 7).contiguous(memory_format=torch.channels_last)
    check(nn.Conv2d(4, 8, 3).double().to(memory_format=torch.channels_last), x)


def test_parametrised_weight_is_left_out() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 3, 2).double())
    check(layer, images(4, 4, 3, 3), names={"bias"})


def test_one_sample_alone_is_refused() -> None:
    call = call_of(nn.Conv1d(2, 3, 2), torch.randn(2, 5))
    assert "no dimension of samples" in str(adapter_of(call.module).call_refusal(call))


def test_other_convolution_under_the_same_forward_is_refused() -> None:
    class Standardised(nn.Conv2d):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(input, weight - weight.mean(), bias)

    assert find(Standardised(2, 3, 2)) == (None, "Standardised overrides the _conv_forward of Conv2d")


def test_the_gram_form_is_chosen_where_it_is_cheaper() -> None:
    small = call_of(nn.Conv2d(256, 256, 3), torch.randn(8, 256, 3, 3))
    assert adapter_of(small.module).prefers_gram(small, 8)
    large = call_of(nn.Conv2d(3, 8, 3), torch.randn(8, 3, 16, 16))
    assert not adapter_of(large.module).prefers_gram(large, 8)
    back = call_of(nn.ConvTranspose2d(256, 256, 3), torch.randn(8, 256, 1, 1))
    assert adapter_of(back.module).prefers_gram(back, 8)


@pytest.mark.parametrize(
    ("device", "rank", "positions", "weight", "blocks", "way"),
    [
        ("cpu", 8, 16, (64, 64, 3, 3), 1, ways.Way.IN_TURN),  # a group is work enough for a call
        ("cpu", 64, 16, (16, 16, 3, 3), 1, ways.Way.FOLDED),
        ("cpu", 64, 16, (16, 12, 3, 3), 1, ways.Way.IN_TURN),  # not in eights
        ("cpu", 8, 16, (32, 1, 3, 3), 32, ways.Way.FOLDED),
        ("cpu", 8, 128, (32, 1, 3, 3), 1, ways.Way.FOLDED),
        ("cpu", 8, 784, (32, 1, 3, 3), 1, ways.Way.IN_TURN),  # a group is work enough
        ("cpu", 8, 784, (32, 2, 3, 3), 1, ways.Way.IN_TURN),
        ("cpu", 8, 4, (256, 128, 3, 3), 1, ways.Way.WINDOWS),  # few windows, many channels
        ("cpu", 1, 1, (512, 512, 3, 3), 1, ways.Way.WINDOWS),
        ("cpu", 1, 16, (512, 512, 3, 3), 1, ways.Way.IN_TURN),
        ("cpu", 8, 1, (64, 1, 3, 3), 64, ways.Way.FOLDED),
        ("cuda", 8, 16, (128, 128, 3, 3), 1, ways.Way.WINDOWS),
        ("cuda", 8, 64, (64, 64, 3, 3), 1, ways.Way.FOLDED),
        ("cuda", 8, 16, (32, 1, 3, 3), 32, ways.Way.FOLDED),
        ("cuda", 1, 16, (128, 128, 3, 3), 1, ways.Way.IN_TURN),  # the layer's own weight gradient
    ],
)
def test_which_way(device: str, rank: int, positions: int, weight: tuple[int, ...], blocks: int, way: ways.Way) -> None:
    assert ways.way(device, Groups(128, rank), positions, weight, blocks) is way


def test_which_way_with_a_stride() -> None:
    stem = (64, 3, 7, 7)
    assert ways.way("cuda", Groups(128, 8), 256, stem, 1) is ways.Way.FOLDED
    assert ways.way("cuda", Groups(128, 8), 256, stem, 1, strided=True) is ways.Way.WINDOWS
    assert ways.way("cuda", Groups(128, 8), 4096, stem, 1, strided=True) is ways.Way.FOLDED  # too many to write down


@pytest.mark.parametrize(("batch", "most"), [(7, 3), (12, 1), (8, 8)])
def test_a_large_batch_is_pulled_back_in_parts(batch: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library writes down besides never has more samples than fit; where twice as much would, it has all."""
    layer, x = nn.Conv2d(2, 4, 3, stride=2, padding=1).double(), images(batch, 2, 6, 8).requires_grad_()
    call = call_of(layer, x.detach())
    monkeypatch.setattr(conv.outer, "CACHED", (most if most < batch else batch // 2) * x[0].numel())
    with torch.no_grad(), Rows() as rows:
        found = adapter_of(layer).pull_back(call, layer.weight)
    torch.testing.assert_close(found, torch.autograd.grad(layer(x), x, call.h)[0], rtol=1e-12, atol=1e-12)
    assert max(rows.seen) == most
    assert sum(rows.seen) == batch


class Rows(TorchDispatchMode):
    """How many samples the convolutions of a block are asked for at a time, backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.seen.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_windows_are_formed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, formed = nn.Conv2d(3, 4, 3, padding=1).double(), []
    call = call_of(layer, images(5, 3, 4, 4))
    form = windows.windows
    monkeypatch.setattr(windows, "windows", lambda *args: formed.append(0) or form(*args))
    call.memo, adapter, weights = {}, adapter_of(layer), torch.arange(5.0, dtype=torch.float64)
    found = adapter.group_gradients(call.weighted(weights), Groups(5, 1))["weight"][0]
    adapter.grams(call)
    assert len(formed) == 1
    call.memo = None
    each = adapter.group_gradients(call, Groups(5, 5))["weight"]
    assert_same(found, torch.tensordot(weights, each, 1))
    shorter = call_of(layer, images(5, 3, 4, 4))
    shorter.memo = {}
    adapter.grams(shorter)
    assert_same(adapter.grams(shorter.rows(1, 3))["weight"], adapter.grams(call)["weight"][1:3, 1:3])

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layers.oracle import adapter_of, assert_same, brute_force, call_of, check
from torch import Tensor, distributed, nn

from ocnopt.fused import norms
from ocnopt.groups import Groups
from ocnopt.layers import Call, find


def perturbed(layer: nn.Module) -> nn.Module:
    """Weights and statistics other than ones and zeros."""
    torch.manual_seed(0)
    layer.double()
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    return layer


def inputs(*shape: int) -> Tensor:
    return 2 * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.LayerNorm(4), (5, 4)),
        (nn.LayerNorm(4), (5, 3, 4)),
        (nn.LayerNorm(4, eps=0.3), (5, 2, 3, 4)),
        (nn.LayerNorm((3, 4)), (5, 3, 4)),
        (nn.LayerNorm((3, 4), bias=False), (5, 2, 3, 4)),
        (nn.RMSNorm(4), (5, 4)),
        (nn.RMSNorm(4, eps=0.3), (5, 3, 4)),
        (nn.RMSNorm((3, 4)), (5, 2, 3, 4)),
        (nn.GroupNorm(2, 4), (5, 4)),
        (nn.GroupNorm(4, 4, eps=0.3), (5, 4, 6)),
        (nn.GroupNorm(1, 4), (5, 4, 2, 3)),
        (nn.BatchNorm1d(4), (5, 4)),
        (nn.BatchNorm1d(4, eps=0.3), (5, 4, 3)),
        (nn.BatchNorm2d(4), (5, 4, 2, 3)),
        (nn.BatchNorm3d(4), (5, 4, 2, 1, 2)),
        (nn.BatchNorm2d(4, track_running_stats=False), (5, 4, 2, 3)),
        (nn.SyncBatchNorm(4), (5, 4, 2, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_norms(layer: nn.Module, shape: tuple[int, ...], training: bool) -> None:
    check(perturbed(layer).train(training), inputs(*shape))


@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm(4, elementwise_affine=False),
        nn.RMSNorm(4, elementwise_affine=False),
        nn.GroupNorm(2, 4, affine=False),
        nn.BatchNorm1d(4, affine=False),
    ],
)
def test_without_parameters(layer: nn.Module) -> None:
    call = call_of(layer, torch.randn(3, 4))
    adapter = adapter_of(layer)
    assert adapter.parameters(layer) == {}
    assert adapter.group_gradients(call, Groups(3, 2)) == {}


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 7),
    shared=st.lists(st.integers(1, 3), max_size=2),
    shape=st.lists(st.integers(2, 4), min_size=1, max_size=2),
    rank=st.integers(1, 9),
    kind=st.sampled_from([nn.LayerNorm, nn.RMSNorm]),
)
def test_trailing_shapes(batch: int, shared: list[int], shape: list[int], rank: int, kind: Any) -> None:
    check(perturbed(kind(shape)), inputs(batch, *shared, *shape), ranks=[rank])


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(2, 7),
    space=st.lists(st.integers(1, 3), max_size=3),
    rank=st.integers(1, 9),
    training=st.booleans(),
)
def test_channel_shapes(batch: int, space: list[int], rank: int, training: bool) -> None:
    x = inputs(batch, 4, *space)
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[len(space)]
    check(perturbed(kind(4)).train(training), x, ranks=[rank])
    check(perturbed(nn.GroupNorm(2, 4)), x, ranks=[rank])


def test_one_sample_in_eval_mode() -> None:
    check(perturbed(nn.BatchNorm1d(4)).eval(), inputs(1, 4))


def test_running_statistics_are_not_touched() -> None:
    layer = perturbed(nn.BatchNorm2d(4))
    call = call_of(layer, inputs(5, 4, 2, 3))
    before = {n: b.clone() for n, b in layer.named_buffers()}
    with torch.no_grad():
        adapter_of(layer).gram(call)
    for name, buffer in layer.named_buffers():
        torch.testing.assert_close(buffer, before[name], rtol=0, atol=0)


def test_the_mode_is_that_of_the_call() -> None:
    """A user may evaluate between backward and step, and leave the model in eval mode."""
    layer = perturbed(nn.BatchNorm1d(4))
    call = call_of(layer, inputs(5, 4))
    adapter = adapter_of(layer)
    with torch.no_grad():
        expected = adapter.gram(call)
        layer.eval()
        assert_same(adapter.gram(call), expected)


def test_coupling_is_told() -> None:
    layer = nn.BatchNorm1d(4)
    assert adapter_of(layer).couples_samples(layer)
    assert not adapter_of(layer).couples_samples(layer.eval())
    untracked = nn.BatchNorm1d(4, track_running_stats=False).eval()
    assert adapter_of(untracked).couples_samples(untracked)
    norm = nn.LayerNorm(4)
    assert not adapter_of(norm).couples_samples(norm)


def test_half_precision_epsilon_of_rms_norm() -> None:
    """eps=None means float32's epsilon for bfloat16 inputs: with inputs this small it decides the result."""
    layer = nn.RMSNorm(4)
    x = (1e-4 * torch.randn(3, 4)).bfloat16()
    with torch.no_grad():
        call = call_of(layer.bfloat16(), x)
        call.h = torch.ones_like(call.h)
        weight = adapter_of(layer).group_gradients(call, Groups(3, 3))["weight"]
        torch.testing.assert_close(weight, layer(x).float(), rtol=1e-2, atol=1e-6)


def test_no_dimension_of_samples_is_refused() -> None:
    for kind in (nn.LayerNorm, nn.RMSNorm):
        call = call_of(kind((3, 4)), torch.randn(3, 4))
        assert "no dimension of samples" in str(adapter_of(call.module).call_refusal(call))


def test_statistics_of_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.SyncBatchNorm(4)
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda group=None: 1)
    assert find(layer)[1] is None
    monkeypatch.setattr(distributed, "get_world_size", lambda group=None: 4)
    adapter, reason = find(layer)
    assert adapter is None
    assert reason == "its batch statistics are those of 4 processes, of which this is one"
    assert find(nn.BatchNorm2d(4))[1] is None


@pytest.mark.parametrize("shape", [(12, 4), (12, 4, 3), (12, 4, 2, 3)], ids=str)
@pytest.mark.parametrize("rank", [2, 3, 5])
@pytest.mark.parametrize("cached", [1, 100, 10**6])
def test_gradients_by_group_some_groups_at_a_time(
    shape: tuple[int, ...], rank: int, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "CACHED", cached)
    torch.manual_seed(0)
    x, h, dims = torch.randn(shape).double() + 3, torch.randn(shape).double(), [0, *range(2, len(shape))]
    layer, groups = nn.BatchNorm1d(4).double() if len(shape) < 4 else nn.BatchNorm2d(4).double(), Groups(12, rank)
    nn.init.normal_(layer.weight)
    statistics = x.mean(dims), (x.var(dims, unbiased=False) + layer.eps).rsqrt()
    found = norms.backward(x, h, *statistics, layer.weight.detach(), groups)
    assert found is not None
    expected = brute_force(Call(layer, (x,), {}, h), groups)
    assert_same(found.columns[0], expected["weight"])
    assert_same(found.columns[1], expected["bias"])
    assert_same(found.weight, expected["weight"].sum(0))
    x.requires_grad_()
    assert_same(found.into, torch.autograd.grad(layer(x), x, h)[0])

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layers.oracle import adapter_of, assert_same, call_of, check
from torch import Tensor, nn

from ocnopt.groups import Groups
from ocnopt.layers import Recompute, find
from ocnopt.rng import RNGState

ALL = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
SEPARATE = {"q_proj_weight", "k_proj_weight", "v_proj_weight"}


def attention(width: int = 4, heads: int = 2, **options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(width, heads, batch_first=True, **options).double()
    with torch.no_grad():
        for p in layer.parameters():  # biases start at zero
            p.copy_(torch.randn_like(p))
    return layer


def sequences(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "zero attention": {"add_zero_attn": True},
    "bias of keys and values": {"add_bias_kv": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
    "dropout": {"dropout": 0.4},
    "everything": {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.4, "bias": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("need_weights", [True, False])
def test_self_attention(options: dict[str, Any], need_weights: bool) -> None:
    x = sequences(5, 3, 4)
    check(attention(**options), x, x, x, need_weights=need_weights)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("sizes", [(4, 4), (3, 5)], ids=["packed", "separate"])
def test_cross_attention(options: dict[str, Any], sizes: tuple[int, int]) -> None:
    layer = attention(kdim=sizes[0], vdim=sizes[1], **options)
    query, key, value = (
        sequences(5, 3, 4),
        sequences(5, 2, sizes[0], seed=1),
        sequences(5, 2, sizes[1], seed=2),
    )
    check(layer, query, key=key, value=value)


def test_names() -> None:
    assert set(adapter_of(attention()).parameters(attention())) == ALL
    separate = attention(kdim=3, add_bias_kv=True)
    expected = SEPARATE | ALL - {"in_proj_weight"} | {"bias_k", "bias_v"}
    assert set(adapter_of(separate).parameters(separate)) == expected


@pytest.mark.parametrize("bias", [False, True], ids=["projections", "recomputed"])
def test_masks(bias: bool) -> None:
    layer = attention(add_bias_kv=bias)
    x = sequences(4, 3, 4)
    padding = torch.tensor([[False, False, True]] * 2 + [[False, True, True]] * 2)
    check(layer, x, x, x, attn_mask=causal(3))
    check(layer, x, x, x, attn_mask=causal(3), is_causal=True, need_weights=False)
    check(layer, x, x, x, key_padding_mask=padding)
    check(layer, x, x, x, key_padding_mask=padding, attn_mask=causal(3))
    check(layer, x, x, x, None, False, sequences(4 * 2, 3, 3))


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 6),
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    heads=st.integers(1, 2),
    bias=st.booleans(),
    rank=st.integers(1, 8),
)
def test_shapes_and_ranks(batch: int, lengths: tuple[int, int], heads: int, bias: bool, rank: int) -> None:
    query, memory = sequences(batch, lengths[0], 2 * heads), sequences(batch, lengths[1], 2 * heads, seed=1)
    check(attention(2 * heads, heads, bias=bias), query, memory, memory, ranks=[rank])


def test_frozen_parameters_are_left_out() -> None:
    layer = attention()
    layer.in_proj_weight.requires_grad_(False)
    x = sequences(5, 3, 4)
    check(layer, x, x, x, names=ALL - {"in_proj_weight"})


@pytest.mark.parametrize("which", ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"])
def test_parametrised_projection_is_left_out(which: str) -> None:
    class Doubled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    layer, name = attention(), which.removeprefix("out_proj.")
    nn.utils.parametrize.register_parametrization(layer if name == which else layer.out_proj, name, Doubled())
    x = sequences(5, 3, 4)
    check(layer, x, x, x, names=ALL - {which})


def test_projections_equal_recomputation() -> None:
    """The two ways to the same gradients, with the same dropout masks."""
    layer, x = attention(dropout=0.4), sequences(5, 3, 4)
    call = call_of(layer, x, x, x)
    with torch.no_grad():
        fast = adapter_of(layer).group_gradients(call, Groups(5, 3))
        slow = Recompute(children=True).group_gradients(call, Groups(5, 3))
    assert fast.keys() == slow.keys()
    for name, g in fast.items():
        assert_same(g, slow[name])


def test_dropout_needs_the_random_numbers_of_the_call() -> None:
    layer, x = attention(dropout=0.4), sequences(5, 3, 4)
    adapter, call = adapter_of(layer), call_of(layer, x, x, x)
    assert adapter.needs_rng(layer)
    assert not adapter.needs_rng(attention())
    with torch.no_grad():
        expected = adapter.gram(call)
        torch.manual_seed(99)
        assert_same(adapter.gram(call), expected)
        other = adapter.gram(replace(call, rng=RNGState.capture()))
    assert (other - expected).abs().max() > 1e-3
    with pytest.raises(ValueError, match=r"call\.rng must be kept for MultiheadAttention"):
        adapter.group_gradients(replace(call, rng=None), Groups(5, 3))


def test_unknown_direction_is_an_error() -> None:
    layer, x = attention(), sequences(5, 3, 4)
    with pytest.raises(KeyError, match="direction has 'weight'"), torch.no_grad():
        adapter_of(layer).project(call_of(layer, x, x, x), {"weight": torch.zeros(4, 4)})


def test_the_gram_form_is_chosen_where_it_is_cheaper() -> None:
    layer, x = attention(64), sequences(8, 1, 64)
    assert adapter_of(layer).prefers_gram(call_of(layer, x, x, x), 8)
    x = sequences(8, 32, 64)
    assert not adapter_of(layer).prefers_gram(call_of(layer, x, x, x), 8)


def test_samples_elsewhere_are_refused() -> None:
    adapter, reason = find(nn.MultiheadAttention(4, 2))
    assert adapter is None
    assert reason == "with batch_first=False dimension 0 of its input is the sequence, not the samples"
    x = sequences(3, 4)
    call = call_of(attention(), x, x, x)
    assert "no dimension of samples" in str(adapter_of(call.module).call_refusal(call))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """Weights in float32, the call in bfloat16: repeated as it was, gradients formed in float32."""
    layer, x = attention().float(), sequences(5, 3, 4).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        call = replace(call_of(layer, x, x, x), autocast=torch.bfloat16)
    assert call.h.dtype == torch.bfloat16
    exact = call_of(attention(), x.double(), x.double(), x.double())
    with torch.no_grad():
        actual = adapter_of(layer).group_gradients(call, Groups(5, 2))
        expected = adapter_of(layer).group_gradients(exact, Groups(5, 2))
    for name, g in actual.items():
        assert g.dtype == torch.float32
        assert (g - expected[name]).abs().max() < 0.05 * expected[name].abs().max()

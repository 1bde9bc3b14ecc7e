from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layers.oracle import adapter_of, assert_same, call_of, check
from torch import nn

from ocnopt.groups import Groups


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 5), (7, 4, 5), (5, 2, 3, 5), (1, 5), (1, 3, 5)])
def test_any_number_of_leading_dimensions(shape: tuple[int, ...], bias: bool) -> None:
    check(nn.Linear(5, 3, bias=bias).double(), torch.randn(shape, dtype=torch.float64))


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 9),
    shared=st.lists(st.integers(1, 4), max_size=2),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    bias=st.booleans(),
    rank=st.integers(1, 12),
)
def test_shapes_and_ranks(batch: int, shared: list[int], sizes: tuple[int, int], bias: bool, rank: int) -> None:
    x = torch.randn(batch, *shared, sizes[0], dtype=torch.float64)
    check(nn.Linear(*sizes, bias=bias).double(), x, ranks=[rank])


def test_keyword_input() -> None:
    check(nn.Linear(5, 3).double(), input=torch.randn(4, 5, dtype=torch.float64))


def test_output_projection_of_attention_is_linear() -> None:
    layer = nn.modules.linear.NonDynamicallyQuantizableLinear(5, 3).double()
    check(layer, torch.randn(4, 5, dtype=torch.float64))


def test_strided_inputs_and_adjoints() -> None:
    layer = nn.Linear(5, 3).double()
    call = check(layer, torch.randn(5, 4, 6, dtype=torch.float64).permute(2, 1, 0))
    one = torch.randn(3, dtype=torch.float64)
    call.h = one.expand(6, 4, 3)
    with torch.no_grad():
        gradients = adapter_of(layer).group_gradients(call, Groups(6, 4))
    assert_same(gradients["bias"].sum(0), 24 * one)


def test_empty_batch() -> None:
    call = call_of(nn.Linear(5, 3).double(), torch.zeros(0, 4, 5, dtype=torch.float64))
    adapter = adapter_of(call.module)
    with torch.no_grad():
        gradients = adapter.group_gradients(call, Groups(0, 4))
        assert_same(gradients["weight"], torch.zeros(1, 3, 5, dtype=torch.float64))
        assert_same(gradients["bias"], torch.zeros(1, 3, dtype=torch.float64))
        assert adapter.gram(call).shape == (0, 0)


def test_frozen_parameters_are_left_out() -> None:
    layer = nn.Linear(5, 3).double()
    layer.weight.requires_grad_(False)
    check(layer, torch.randn(4, 5, dtype=torch.float64), names={"bias"})
    assert adapter_of(layer).kronecker_names(layer) == ()
    layer.weight.requires_grad_(True)
    assert layer.bias is not None
    layer.bias.requires_grad_(False)
    check(layer, torch.randn(4, 5, dtype=torch.float64), names={"weight"})
    assert adapter_of(layer).kronecker_names(layer) == ("weight",)


def test_parametrised_weight_is_left_out() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3).double())
    check(layer, torch.randn(4, 5, dtype=torch.float64), names={"bias"})


def test_pruned_weight_is_left_out() -> None:
    from torch.nn.utils import prune

    layer = prune.l1_unstructured(nn.Linear(5, 3).double(), "weight", amount=0.5)
    check(layer, torch.randn(4, 5, dtype=torch.float64), names={"bias"})


def test_single_vector_is_refused() -> None:
    call = call_of(nn.Linear(5, 3), torch.randn(5))
    assert "no dimension of samples" in str(adapter_of(call.module).call_refusal(call))


def test_unknown_direction_is_an_error() -> None:
    call = call_of(nn.Linear(5, 3), torch.randn(4, 5))
    with pytest.raises(KeyError, match="direction has 'scale'"):
        adapter_of(call.module).project(call, {"scale": torch.zeros(3)})


@pytest.mark.parametrize(
    ("batch", "shared", "width", "rank", "gram"),
    [
        (64, 1, 256, 64, True),  # a gradient per sample, one position
        (64, 1, 256, 1, False),  # p.grad is there already
        (64, 128, 256, 8, False),  # many positions
        (64, 4, 64, 32, False),
        (1, 1, 4, 1, False),
    ],
)
def test_the_gram_form_is_chosen_where_it_is_cheaper(
    batch: int, shared: int, width: int, rank: int, gram: bool
) -> None:
    call = call_of(nn.Linear(width, width), torch.randn(batch, shared, width))
    assert adapter_of(call.module).prefers_gram(call, rank) is gram

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layers.oracle import adapter_of, assert_same, call_of, check
from torch import Tensor, nn

from ocnopt.groups import Groups
from ocnopt.layers import embedding, find, outer


def tokens(*shape: int, words: int = 6) -> Tensor:
    return torch.randint(words, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(7,), (7, 4), (5, 2, 3), (1, 4)])
@pytest.mark.parametrize("padding", [None, 2, -1])
@pytest.mark.parametrize("scaled", [False, True])
def test_options(shape: tuple[int, ...], padding: int | None, scaled: bool) -> None:
    layer = nn.Embedding(6, 3, padding_idx=padding, scale_grad_by_freq=scaled).double()
    check(layer, tokens(*shape))


def test_maximal_norm() -> None:
    check(nn.Embedding(6, 3, max_norm=0.5).double(), tokens(5, 4))


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 7),
    shared=st.lists(st.integers(1, 4), max_size=2),
    words=st.integers(1, 9),
    rank=st.integers(1, 9),
)
def test_shapes_and_ranks(batch: int, shared: list[int], words: int, rank: int) -> None:
    check(nn.Embedding(words, 3).double(), tokens(batch, *shared, words=words), ranks=[rank])


@pytest.mark.parametrize("piece", [1, 20, 2**24])
def test_both_gram_forms(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "PIECE", piece)
    layer = nn.Embedding(6, 3).double()
    call = call_of(layer, tokens(5, 4))
    with torch.no_grad():
        g = adapter_of(layer).group_gradients(call, Groups(5, 5))["weight"].flatten(1)
    assert_same(embedding._gram_by_pairs(call.x, call.h), g @ g.T)
    assert_same(embedding._gram_by_gradients(call.x, call.h, 6), g @ g.T)


@pytest.mark.parametrize(("words", "form"), [(100, "pairs"), (6, "gradients")])
def test_the_cheaper_gram_form_is_taken(words: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for name in ("pairs", "gradients"):
        monkeypatch.setattr(embedding, f"_gram_by_{name}", lambda *_, name=name: taken.append(name))
    call = call_of(nn.Embedding(words, 3), tokens(5, 4))
    adapter_of(call.module).grams(call)
    assert taken == [form]


def test_the_gram_form_is_chosen_where_it_is_cheaper() -> None:
    call = call_of(nn.Embedding(1000, 2), tokens(8, 4))
    adapter = adapter_of(call.module)
    assert adapter.prefers_gram(call, 8)
    assert not adapter.prefers_gram(call, 1)
    assert not adapter.prefers_gram(call_of(nn.Embedding(2, 2), tokens(8, 4, words=2)), 2)


def test_unknown_direction_is_an_error() -> None:
    call = call_of(nn.Embedding(6, 3), tokens(4, 2))
    with pytest.raises(KeyError, match="direction has 'bias'"):
        adapter_of(call.module).project(call, {"bias": torch.zeros(3)})


def test_frozen() -> None:
    layer = nn.Embedding(6, 3)
    layer.weight.requires_grad_(False)
    adapter = adapter_of(layer)
    call = call_of(layer, tokens(4, 2))
    assert adapter.parameters(layer) == adapter.group_gradients(call, Groups(4, 2)) == adapter.grams(call) == {}


def test_sparse_gradients_are_refused() -> None:
    assert find(nn.Embedding(6, 3, sparse=True)) == (None, "its gradients are sparse (sparse=True)")


def test_a_single_token_is_refused() -> None:
    call = call_of(nn.Embedding(6, 3), torch.tensor(2))
    assert "cannot be the samples" in str(adapter_of(call.module).call_refusal(call))

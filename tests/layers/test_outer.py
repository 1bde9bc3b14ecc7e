from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.layers.oracle import assert_same
from torch import Tensor

from ocnopt.groups import Groups
from ocnopt.layers import outer


@pytest.mark.parametrize("form", [outer._gram_by_pairs, outer._gram_by_gradients, outer.gram])
@pytest.mark.parametrize("piece", [1, 100, 2**24])
@pytest.mark.parametrize("shape", [(5, 1, 1), (5, 2, 3), (1, 3, 2), (4, 1, 7), (3, 2, 0)])
def test_gram_forms(
    form: Callable[[Tensor, Tensor], Tensor],
    piece: int,
    shape: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outer, "PIECE", piece)
    x, h = torch.randn(*shape, 4, dtype=torch.float64), torch.randn(*shape, 3, dtype=torch.float64)
    g = torch.einsum("nbtc,nbta->nbca", h, x).flatten(1)
    assert_same(form(x, h), g @ g.T)
    assert_same(outer.group_sums(x, h, Groups(shape[0], shape[0])).flatten(1), g)


@pytest.mark.parametrize(("shape", "form"), [((8, 1, 1), "pairs"), ((2, 1, 50), "gradients")])
def test_the_cheaper_gram_form_is_taken(
    shape: tuple[int, int, int], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    for name in ("pairs", "gradients"):
        monkeypatch.setattr(outer, f"_gram_by_{name}", lambda *_, name=name: taken.append(name))
    outer.gram(torch.zeros(*shape, 16), torch.zeros(*shape, 16))
    assert taken == [form]


@given(total=st.integers(0, 50), size=st.integers(0, 2**26))
def test_pieces_cover_everything_once(total: int, size: int) -> None:
    parts = [list(range(total))[part] for part in outer.pieces(total, size)]
    assert [i for part in parts for i in part] == list(range(total))
    assert all(len(part) * size <= outer.PIECE or len(part) == 1 for part in parts)


@pytest.mark.parametrize("rank", [3, 4, 6])  # uneven, with groups of different sizes, even
@pytest.mark.parametrize("batch", [6, 12])
def test_sums_of_groups(batch: int, rank: int) -> None:
    groups = Groups(batch, rank)
    rows = torch.randn(batch, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = torch.randn(batch, batch, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = [slice(a, b) for a, b in pairwise(groups.starts)]
    torch.testing.assert_close(groups.sum(rows), torch.stack([rows[part].sum(0) for part in parts]))
    torch.testing.assert_close(groups.sum(rows, [1, 3]), torch.stack([rows[part].sum((0, 1, 3)) for part in parts]))
    expected = torch.stack([torch.stack([pairs[a, b].sum() for b in parts]) for a in parts])
    torch.testing.assert_close(groups.sum_pairs(pairs), expected)


@pytest.mark.parametrize(
    ("length", "parts"), [(100, 1), (255, 1), (256, 2), (4608, 32), (512, 4), (1021, 1), (1029, 7)]
)
def test_long_sums_in_parts(length: int, parts: int) -> None:
    assert outer.parts_of(length) == parts


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_products_in_parts(parts: int) -> None:
    x, y = (torch.randn(2, n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (3, 5))
    torch.testing.assert_close(outer.products(x, y, parts), x @ y.mT)

"""Eigendecompositions that leave out what is nothing but zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ocnopt import linalg


def _with_zeros(n: int, empty: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(2, n // 2, n, dtype=torch.float64, generator=generator)
    x[..., empty] = 0
    return x.mT @ x


@pytest.mark.parametrize("empty", [[], [0], [3, 4, 70], list(range(10, 75)), list(range(80))])
def test_rows_of_zeros_are_left_out(empty: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: sizes.append(m.shape[-1]) or eigh(m))
    matrices = _with_zeros(80, empty)
    found = linalg.safe_eigh(matrices)
    assert found is not None
    values, vectors = found
    assert sizes == [80 - len(empty)]
    torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mT, matrices)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(80, dtype=torch.float64).expand(2, -1, -1))
    torch.testing.assert_close(values, eigh(matrices)[0].clamp_min(0))


def test_a_row_that_is_zero_in_one_matrix_only_stays() -> None:
    matrices = _with_zeros(80, [])
    matrices[0, 5] = 0
    matrices[0, :, 5] = 0
    found = linalg.safe_eigh(matrices)
    assert found is not None
    values, vectors = found
    torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mT, matrices)

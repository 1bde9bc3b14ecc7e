from __future__ import annotations

import pytest
import torch

from ocnopt.lab.data.splits import stratified_indices


def labels(*counts: int) -> torch.Tensor:
    return torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])


def test_every_class_is_split_in_the_same_proportion_and_the_total_is_exact() -> None:
    y = labels(59, 71, 48)
    first, second = stratified_indices(y, 0.2, seed=0)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(178))
    # 11.8, 14.2 and 9.6 of 35.6: the largest remainders are rounded up
    assert torch.bincount(y[second]).tolist() == [12, 14, 10]


def test_the_split_depends_on_the_seed_and_on_nothing_else() -> None:
    y = labels(30, 30)
    torch.manual_seed(1)
    a = stratified_indices(y, 0.5, seed=3)
    torch.manual_seed(2)
    b = stratified_indices(y, 0.5, seed=3)
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert not torch.equal(a[1], stratified_indices(y, 0.5, seed=4)[1])


def test_indices_ascend_and_are_not_simply_the_first_ones() -> None:
    _, second = stratified_indices(labels(50), 0.2, seed=0)
    assert second.tolist() == sorted(second.tolist())
    assert second.tolist() != list(range(10))


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5])
def test_a_fraction_outside_0_1_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=f"fraction must lie strictly between 0 and 1, got {fraction}"):
        stratified_indices(labels(10), fraction, seed=0)


def test_an_empty_part_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves one part empty"):
        stratified_indices(labels(3), 0.01, seed=0)

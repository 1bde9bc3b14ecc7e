"""WINE, DIGITS and Circle: no files needed."""

from __future__ import annotations

import doctest

import pytest
import torch

import ocnopt.lab.data as package
from ocnopt.lab.data import load


def test_wine_is_split_by_class_and_standardised_with_the_train_part() -> None:
    data = load("WINE")
    assert (len(data.train), len(data.test), data.input_shape) == (142, 36, (13,))
    assert data.train.label_counts(3) == [47, 57, 38]
    assert data.test.label_counts(3) == [12, 14, 10]
    torch.testing.assert_close(data.train.x.mean(0), torch.zeros(13), atol=1e-6, rtol=0)
    torch.testing.assert_close(data.train.x.std(0, correction=0), torch.ones(13), atol=1e-6, rtol=0)
    assert data.test.x.mean(0).abs().max() > 1e-3
    assert not data.subset


def test_digits_are_small_images_in_0_1() -> None:
    data = load("digits")
    assert (len(data.train), len(data.test), data.input_shape) == (1438, 359, (1, 8, 8))
    assert (data.train.x.min(), data.train.x.max()) == (0, 1)
    whole = torch.tensor(data.train.label_counts(10)) + torch.tensor(data.test.label_counts(10))
    assert whole.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert data.classes == tuple("0123456789")


@pytest.mark.parametrize("name", ["WINE", "DIGITS", "Circle"])
def test_the_seed_decides(name: str) -> None:
    a, b, other = load(name), load(name, split_seed=0), load(name, split_seed=1)
    assert torch.equal(a.train.x, b.train.x)
    assert torch.equal(a.test.x, b.test.x)
    assert not torch.equal(a.test.x, other.test.x)


def test_circle_is_two_noisy_circles_and_its_parts_are_independent() -> None:
    data = load("Circle")
    assert data.task == "density"
    assert data.validation is not None
    assert [len(part) for part in (data.train, data.validation, data.test)] == [10000, 2000, 2000]
    radius = data.train.x.norm(dim=1)
    for label, expected in ((0, 1.0), (1, 0.5)):
        ring = radius[data.train.y == label]
        assert len(ring) == 5000
        assert ring.mean().item() == pytest.approx(expected, abs=0.01)
        assert ring.std().item() == pytest.approx(0.06, rel=0.05)
    both = torch.cat((data.validation.x, data.test.x))
    assert len(both.unique(dim=0)) == 4000


def test_the_examples_of_the_package_run() -> None:
    result = doctest.testmod(package)
    assert result.attempted == 4
    assert result.failed == 0

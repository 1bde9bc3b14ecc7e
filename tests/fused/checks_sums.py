"""The same for inner products and other sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.fused.networks import (
    DEVICE,
    found,
    one_pass,
    pair,
)
from torch import Tensor, nn

from ocnopt import OCNOpt, readings
from ocnopt.fused import dots, sums, support
from ocnopt.groups import Groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 1000, 4096, 9000])
def test_inner_products(size: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(size, generator=draw).to(DEVICE, dtype) for _ in range(2))
    less = torch.tensor(0.7, device=DEVICE)
    expected = torch.dot(x.double(), y.double())
    for _ in range(2):  # nothing of the first is left for the second
        whole = dots.dot(x, y)
        torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(dots.dot(x, y, less), whole - less, rtol=1e-6, atol=1e-6)
    assert torch.equal(dots.dot(x, y, whole), torch.zeros((), device=DEVICE))  # the same numbers in the same order
    assert dots.dot(x.double(), y.double()) is None


@pytest.mark.parametrize("shape", [(7, 3, 5), (5, 2500), (130, 1)])
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_changes_by_group(rank: int, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=draw).to(DEVICE) for _ in range(2))
    groups = None if rank == 1 else Groups(len(x), rank)
    each = (x.double() * y.double()).flatten(1).sum(1) - 0.3
    before = torch.full((len(x),), 0.3, device=DEVICE) if groups else torch.tensor(0.3 * len(x), device=DEVICE)
    expected = each.sum(0, keepdim=True) if groups is None else groups.sum(each)
    plus = torch.randn(rank, generator=draw).to(DEVICE)
    for _ in range(2):
        found = dots.changes(x, y, before, groups)
        torch.testing.assert_close(found.double(), torch.stack([expected, expected]), rtol=1e-5, atol=1e-4)
        found = dots.changes(x, y, before, groups, torch.tensor(0.5, device=DEVICE), -1.0, plus)
        scaled = -0.5 * expected
        torch.testing.assert_close(found.double(), torch.stack([scaled, scaled + plus]), rtol=1e-5, atol=1e-4)
    assert dots.changes(x, y.double(), before, groups) is None
    assert dots.changes(x, torch.ones((), device=DEVICE).expand_as(x), before, groups) is None


def test_more_groups_than_a_program_has_room_for() -> None:
    x = torch.randn(2048, 1, device=DEVICE)
    for rank in (9, 2048):
        assert dots.changes(x, x, torch.zeros(2048, device=DEVICE), Groups(2048, rank)) is None
    assert support._broken is None


@pytest.mark.parametrize("shape", [(7, 3), (7, 2, 5), (40, 2, 9, 9)])
@pytest.mark.parametrize("rank", [1, 3, 7])
def test_sums_by_channel(rank: int, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    x, h = (torch.randn(shape, generator=draw).to(DEVICE) for _ in range(2))
    groups, positions = Groups(len(x), rank), range(2, x.dim())
    found = sums.by_channel(x, h, groups)
    expected = groups.sum(x.double() * h.double(), positions), groups.sum(h.double(), positions)
    torch.testing.assert_close([t.double() for t in found], list(expected), rtol=1e-5, atol=1e-5)
    assert sums.by_channel(x.double(), h.double(), groups) is None
    assert sums.by_channel(x, h.transpose(0, 1).contiguous().transpose(0, 1), groups) is None


@pytest.mark.parametrize("shape", [(3, 7), (8, 40, 32), (5, 1), (9, 4), (2, 0)])
def test_totals(shape: tuple[int, ...]) -> None:
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for given in (G, G.double(), G.mT.contiguous().mT):
        torch.testing.assert_close(sums.total(given), given.sum(0))
    (found,) = torch.autograd.grad(sums.total(G.requires_grad_()).sum(), G)
    assert torch.equal(found, torch.ones_like(G))


def test_inner_products_of_what_is_not_contiguous() -> None:
    y = torch.randn(5, device=DEVICE)
    for x in (torch.randn(5, 8, device=DEVICE)[:, 3], torch.full((), 2.0, device=DEVICE).expand(5)):
        torch.testing.assert_close(dots.dot(x, y), torch.dot(x, y))
        torch.testing.assert_close(dots.dot(y, x), torch.dot(x, y))


def _pairs(dtype: torch.dtype) -> list[dots.Pair]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(1,), (3, 5), (4, 3000), (2, 3, 4, 5), (13_000,), (8, 2, 16)]
    rows = [0, 3, 4, 0, 0, 8]
    x, y = ([torch.randn(s, generator=draw).to(DEVICE, dtype) for s in shapes] for _ in range(2))
    for both in (x, y):
        both[3] = both[3].contiguous(memory_format=torch.channels_last)
    return [dots.Pair(*pair) for pair in zip(x, y, rows, strict=True)]


def _each(pairs: list[dots.Pair]) -> list[Tensor]:
    """Their products, pair by pair."""
    found, places = dots.dots(pairs), dots.places(pairs)
    assert len(found) == places[-1] + max(pairs[-1].rows, 1)
    return [found[i : i + pair.rows] if pair.rows else found[i] for pair, i in zip(pairs, places, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_inner_products(dtype: torch.dtype) -> None:
    pairs = _pairs(dtype)
    for both, got in zip(pairs, _each(pairs), strict=True):
        x, y = (t.double().reshape(both.rows or 1, -1) for t in (both.x, both.y))
        expected = torch.linalg.vecdot(x, y).reshape((both.rows,) if both.rows else ())
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)


def test_many_inner_products_are_those_of_each() -> None:
    """To the last digit: what is taken off a product may have been formed with others. Wherever they begin."""
    whole = [both for both in _pairs(torch.float32) if not both.rows]
    aside = [dots.Pair(x[1:], y[1:], 0) for x, y, _ in whole if x.dim() == 1 and len(x) > 1]
    for some in (whole, aside, [*whole, *aside]):
        for both, got in zip(some, _each(some), strict=True):
            order = (0, 2, 3, 1)[: both.x.dim()] if both.x.dim() == 4 else (0,)
            assert torch.equal(got, dots.dot(*(t.permute(order).reshape(-1) for t in both[:2])))
            assert not dots.changes(both.x, both.y, got, None).any()


def test_which_products_can_be_formed_with_others() -> None:
    x, y = torch.randn(2, 3, 4, 5, device=DEVICE), torch.randn(2, 3, 4, 5, device=DEVICE)
    turned = y.contiguous(memory_format=torch.channels_last)
    assert dots.in_same_order(x, y)
    assert not dots.in_same_order(x, turned)
    assert not dots.in_same_order(x[0], y)
    assert not dots.in_same_order(x, torch.zeros((), device=DEVICE).expand_as(x))
    assert dots.can_wait(x, y.bfloat16())
    assert not dots.can_wait(x, y.double())


@pytest.mark.parametrize(
    ("options", "held"), [({}, 0), ({"rank": 4}, 2**30), ({"curvature": "kronecker"}, 5000)], ids=str
)
def test_products_that_wait_for_each_other(options: dict[str, Any], held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the end of the backward pass, or up to so many bytes."""
    model, plain, ours, fused = pair(feedback="nonlinear", **options)
    plain.param_groups[0]["fused"] = fused.param_groups[0]["fused"] = None
    monkeypatch.setattr(readings, "_HELD", held)
    for opt, can in ((plain, False), (fused, True)):
        with monkeypatch.context() as without:
            if not can:
                without.setattr(dots, "can_wait", lambda x, y: False)
            for i in range(3):
                one_pass(model if opt is plain else ours, i)
                assert not opt._tape.waiting._readings  # the backward pass is over
                opt.step()
    assert_close_steps(ours, fused, model, plain)


def assert_close_steps(ours: nn.Module, fused: OCNOpt, model: nn.Module, plain: OCNOpt) -> None:
    torch.testing.assert_close(found(ours, fused), found(model, plain), rtol=1e-4, atol=1e-6)


def test_a_product_that_waits_is_formed_when_it_is_asked_for() -> None:
    """A backward pass that was interrupted leaves some."""
    waiting, kept = readings.Waiting(), []
    e, d = torch.randn(4, 6, device=DEVICE), torch.randn(4, 6, device=DEVICE)
    for batch in (None, 4):
        reading = readings.Reading(e, batch)
        leaf = torch.zeros((), device=DEVICE, requires_grad=True)

        def interrupt(_: Tensor, reading: readings.Reading = reading) -> None:
            reading.arrive(d, last=True, waiting=waiting)
            kept.append(reading._before)
            raise InterruptedError

        leaf.register_hook(interrupt)
        with pytest.raises(InterruptedError):
            leaf.backward()
        expected = (d * e).sum() if batch is None else (d * e).sum(1)
        torch.testing.assert_close(reading.before, expected, rtol=1e-5, atol=1e-5)
        assert not reading.overwritten
        assert reading._tensor is None
    assert kept == [None, None]


def test_they_are_laid_out_alike_in_whatever_order_they_come() -> None:
    """For a graph, which can lay out nothing, by the pass before."""
    tensors, count = [torch.randn(n, 3, device=DEVICE) for n in (4, 6, 2)], len(dots._plans._known)
    for order in ((0, 1, 2), (2, 0, 1)):
        waiting, found = readings.Waiting(), [readings.Reading(tensors[i], None) for i in order]
        leaf = torch.zeros((), device=DEVICE, requires_grad=True)

        def hook(_: Tensor, waiting: readings.Waiting = waiting, found: list[readings.Reading] = found) -> None:
            for reading in found:
                assert reading._tensor is not None
                reading.arrive(torch.ones_like(reading._tensor), last=True, waiting=waiting)

        leaf.register_hook(hook)
        leaf.backward()
        for i, reading in zip(order, found, strict=True):
            assert reading.before is not None
            torch.testing.assert_close(reading.before, tensors[i].sum(), rtol=1e-5, atol=1e-5)
    assert len(dots._plans._known) == count + 1


def test_what_is_overwritten_while_it_waits() -> None:
    waiting, e = readings.Waiting(), torch.randn(4, 6, device=DEVICE)
    first, second = (readings.Reading(t, None) for t in (e, e.clone()))
    leaf = torch.zeros((), device=DEVICE, requires_grad=True)

    def hook(_: Tensor) -> None:
        for reading in (first, second):
            reading.arrive(torch.ones_like(e), last=True, waiting=waiting)
        e.mul_(2)

    leaf.register_hook(hook)
    leaf.backward()
    assert first.overwritten
    assert not second.overwritten

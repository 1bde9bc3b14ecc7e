"""Chunks and addresses, which need no kernel."""

from __future__ import annotations

import torch

from ocnopt.fused.tables import Layout

PARAMS = [torch.zeros(n) for n in (3, 10, 1, 8)]


def test_chunks() -> None:
    layout = Layout(PARAMS, chunk=4)
    assert layout.total == 1 + 3 + 1 + 2
    assert layout.chunks.tolist() == [[0, 0, 3], [1, 0, 10], [1, 1, 10], [1, 2, 10], [2, 0, 1], [3, 0, 8], [3, 1, 8]]
    assert layout.firsts.tolist() == [0, 1, 4, 5, 7]


def test_runs_of_neighbours() -> None:
    layout = Layout(PARAMS, chunk=4)
    assert layout.runs([0, 1, 2, 3]) == [(0, 7)]
    assert layout.runs([0, 2, 3]) == [(0, 1), (4, 3)]
    assert layout.runs([1]) == [(1, 3)]
    assert layout.runs([]) == []


def test_addresses_follow_the_tensors() -> None:
    layout = Layout(PARAMS, chunk=4)
    grads = [torch.ones_like(p) for p in PARAMS]
    table = layout.table(grads, PARAMS, None)
    assert table is not None
    assert table.grads.tolist() == [g.data_ptr() for g in grads]
    assert table.others.tolist() == [[p.data_ptr() for p in PARAMS], [0] * 4]
    moved = [g.clone() for g in grads]
    again = layout.table(moved, PARAMS, None)
    assert again is not None
    assert again.grads.tolist() == [g.data_ptr() for g in moved]
    assert again.others is table.others
    assert table.aligned
    within = [torch.zeros(p.numel() + 1)[1:] for p in PARAMS]
    odd = layout.table(within, PARAMS, None)
    assert odd is not None
    assert not odd.aligned


def test_numbers_in_another_order() -> None:
    p = torch.zeros(3, 4)
    assert Layout([p], chunk=4).table([torch.zeros(4, 3).T], [p]) is None
    assert Layout([p], chunk=4).table([torch.zeros(3, 4)], [p], [torch.zeros(4, 3).T]) is None
    assert Layout([p], chunk=4).table([torch.zeros(3, 4)], [p], [torch.zeros(3, 4)]) is not None


def test_numbers_in_another_order_in_the_same_place() -> None:
    p, v, layout = torch.zeros(3, 3), torch.zeros(3, 3), Layout([torch.zeros(3, 3)], chunk=4)
    assert layout.table([torch.zeros(3, 3)], [p], [v]) is not None
    assert layout.still_there([0], [p])
    assert not layout.still_there([0], [p.T])
    assert layout.table([torch.zeros(3, 3)], [p], [v.T]) is None
    assert layout.table([torch.zeros(3, 3)], [p], [v]) is not None


def test_state_of_another_kind_or_size() -> None:
    p = torch.zeros(3, 4)
    assert Layout([p], chunk=4).table([p], [p], [torch.zeros(3, 4, dtype=torch.float64)]) is None
    assert Layout([p], chunk=4).table([p], [p], [torch.zeros(2, 4)]) is None
    layout = Layout([p], chunk=4)
    assert layout.table([p], [p]) is not None
    assert layout.table([p[:2]], [p[:2]]) is None  # the same place, and fewer numbers

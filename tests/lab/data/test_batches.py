from __future__ import annotations

import json
from itertools import chain

import pytest
import torch

from ocnopt.lab.data import Batches, Split


def split(count: int) -> Split:
    return Split(torch.arange(count, dtype=torch.float32).reshape(-1, 1), torch.arange(count))


def epoch(batches: Batches) -> list[list[int]]:
    return [batch.y.tolist() for batch in batches]


def test_an_epoch_has_every_sample_once_and_the_last_batch_may_be_smaller() -> None:
    batches = Batches(split(10), 4, seed=0)
    rows = epoch(batches)
    assert [len(row) for row in rows] == [4, 4, 2]
    assert len(batches) == 3
    assert sorted(chain.from_iterable(rows)) == list(range(10))


def test_inputs_and_labels_stay_together() -> None:
    for x, y in Batches(split(10), 3, seed=1):
        assert torch.equal(x.squeeze(1).long(), y)


def test_epochs_differ_and_seeds_differ_but_both_are_repeatable() -> None:
    a, b, other = (Batches(split(50), 7, seed=seed) for seed in (0, 0, 1))
    first, second = epoch(a), epoch(a)
    assert first != second
    torch.manual_seed(99)  # must not matter
    assert [epoch(b), epoch(b)] == [first, second]
    assert epoch(other) != first


def test_without_shuffling_the_order_is_that_of_the_split() -> None:
    assert epoch(Batches(split(5), 2, shuffle=False)) == [[0, 1], [2, 3], [4]]


def test_drop_last_leaves_out_the_incomplete_batch() -> None:
    batches = Batches(split(10), 4, drop_last=True)
    assert [len(row) for row in epoch(batches)] == [4, 4]
    assert len(batches) == 2


@pytest.mark.parametrize("stop", range(1, 8))
def test_a_resumed_run_sees_the_same_batches(stop: int) -> None:
    def run(batches: Batches, count: int) -> list[list[int]]:
        seen: list[list[int]] = []
        while len(seen) < count:
            for batch in batches:
                seen.append(batch.y.tolist())
                if len(seen) == count:
                    break
        return seen

    whole = run(Batches(split(10), 4, seed=5), 9)  # three epochs of three
    before = Batches(split(10), 4, seed=5)
    head = run(before, stop)
    state = json.loads(json.dumps(before.state_dict()))
    after = Batches(split(10), 4, seed=5)
    after.load_state_dict(state)
    assert head + run(after, 9 - stop) == whole


def test_epoch_and_position_count_batches_that_were_handed_out() -> None:
    batches = Batches(split(10), 4)
    seen = [(batches.epoch, batches.position)]
    for _ in batches:
        seen.append((batches.epoch, batches.position))
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_the_usual_loop_ends_after_the_asked_for_epochs_even_when_resumed_at_the_last_batch() -> None:
    batches = Batches(split(10), 4)
    for _ in batches:
        state = batches.state_dict()
    resumed = Batches(split(10), 4)
    resumed.load_state_dict(state)
    count = 0
    while resumed.epoch < 2:
        for _ in resumed:
            count += 1
    assert count == 3


def test_processes_share_each_batch_equally_and_without_overlap() -> None:
    alone = epoch(Batches(split(22), 8, seed=2))
    shares = [epoch(Batches(split(22), 8, seed=2, rank=r, world_size=4)) for r in range(4)]
    for number, row in enumerate(alone):
        parts = [share[number] for share in shares]
        assert len({len(part) for part in parts}) == 1
        assert list(chain.from_iterable(parts)) == row[: len(row) - len(row) % 4]
    assert [len(row) for row in shares[0]] == [2, 2, 1]  # 22 = 8 + 8 + 6, of which 4 can be shared


def test_a_last_batch_that_is_too_small_to_share_is_left_out() -> None:
    assert [len(row) for row in epoch(Batches(split(17), 8, rank=1, world_size=4))] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"batch_size": 2, "seed": -1}, "seed must not be negative, got -1"),
        ({"batch_size": 4, "rank": 2, "world_size": 2}, "rank must lie in"),
        ({"batch_size": 3, "world_size": 2}, "batch_size 3 must be a multiple of world_size 2"),
        ({"batch_size": 20, "drop_last": True}, "leaves no batch of 10 samples"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Batches(split(10), **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed is 0 here but 1 in the saved state"),
        ({"batch_size": 5}, "batch_size is 4 here but 5"),
        ({"samples": 11}, "samples is 10 here but 11"),
        ({"position": 3}, "no batch 3"),
        ({"epoch": -1}, "epoch -1"),
    ],
)
def test_a_state_of_another_run_is_refused(change: dict[str, int], message: str) -> None:
    batches = Batches(split(10), 4)
    with pytest.raises(ValueError, match=message):
        batches.load_state_dict(batches.state_dict() | change)

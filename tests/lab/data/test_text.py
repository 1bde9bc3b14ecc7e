"""Genesis: what it is, how it is cut."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from itertools import pairwise

import pytest
import torch

from ocnopt.lab.data import BLOCK_LENGTH, Dataset, Split, check, load


def text_of(data: Dataset, split: Split) -> str:
    """A part as it reads: its first character, and then all targets."""
    numbers = [int(split.values[0, 0]), *split.y.flatten().tolist()]
    return "".join(data.classes[n] for n in numbers)


def whole() -> str:
    return files("ocnopt.lab.data").joinpath("texts", "genesis.txt").read_text(encoding="utf-8")


def test_the_text_is_the_book() -> None:
    text = whole()
    assert text.startswith("In the beginning God created the heaven and the earth.\n")
    assert text.endswith("he was put in a coffin in Egypt.\n")
    chapters = text.rstrip("\n").split("\n\n")
    assert (len(chapters), sum(len(chapter.splitlines()) for chapter in chapters)) == (50, 1533)
    digest = hashlib.sha256(text.encode()).hexdigest()  # results are compared from year to year
    assert digest == "037cbb491e232356eaa005801cd5a2676667952fda9dd6b2db3c37625eaf7784"


def test_genesis_is_characters_and_what_follows_them() -> None:
    data = load("genesis")
    assert (data.task, data.input_shape, len(data.classes)) == ("text", (BLOCK_LENGTH,), 60)
    assert data.validation is not None
    assert [len(part) for part in (data.train, data.validation, data.test)] == [2460, 307, 307]
    for part in (data.train, data.validation, data.test):
        assert part.values.dtype == torch.int64
        assert torch.equal(part.values[:, 1:], part.y[:, :-1])
        assert torch.equal(part.values[1:, 0], part.y[:-1, -1])  # blocks follow each other
    assert data.classes == tuple(sorted(set(whole())))
    assert not data.subset


@pytest.mark.parametrize("length", [1, 7, 64, 1000])
def test_parts_follow_each_other_and_lose_less_than_a_block(length: int) -> None:
    data, text = load("Genesis", block_length=length), whole()
    assert data.validation is not None
    cuts = (0, 157493, 177180, 196867)
    for part, (start, end) in zip((data.train, data.validation, data.test), pairwise(cuts), strict=True):
        read = text_of(data, part)
        assert text[start:end].startswith(read)
        assert end - start - len(read) < length
        assert part.values.shape[1] == length


def test_a_text_keeps_its_own_validation_part() -> None:
    data = load("Genesis")
    assert data.with_validation(0.3) is data


def test_classes_are_counted_by_character() -> None:
    data = load("Genesis")
    assert data.train.label_counts(60)[data.classes.index(" ")] == text_of(data, data.train)[1:].count(" ")


@pytest.mark.parametrize("length", [0, -1, 19687])
def test_blocks_that_are_none(length: int) -> None:
    with pytest.raises(ValueError, match=rf"block_length must lie in 1\.\.19686, got {length}"):
        load("Genesis", block_length=length)


def test_the_catalogue_finds_nothing_wrong() -> None:
    row = check("Genesis")
    assert (row.status, row.train, row.validation, row.test) == ("complete", 2460, 307, 307)

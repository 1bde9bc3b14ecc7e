"""Text, character by character, cut into blocks: what follows each character is its class."""

from __future__ import annotations

from importlib.resources import files

import torch
from torch import Tensor

from ocnopt.lab.data.dataset import Dataset, Split
from ocnopt.lab.data.registry import ENTRIES

#: of the characters, from the end: the test part, and before it the validation part
HELD_OUT = 0.1


def read_genesis(block_length: int) -> Dataset:
    """1533 verses, one a line, and an empty line between chapters.

    The King James Version is in the public domain (in the United Kingdom printing it is a privilege of the Crown). The
    text is that of Debian's package bible-kjv-text, without the numbers of the verses.
    """
    text = files("ocnopt.lab.data").joinpath("texts", "genesis.txt").read_text(encoding="utf-8")
    return _blocks("Genesis", text, block_length)


def _blocks(name: str, text: str, block_length: int) -> Dataset:
    """Parts by position, so that no piece of one is in another; within a part, each character is in one block."""
    classes = tuple(sorted(set(text)))
    number = {character: n for n, character in enumerate(classes)}
    tokens = torch.tensor([number[character] for character in text])
    held_out = round(HELD_OUT * len(tokens))
    if not 1 <= block_length < held_out:
        raise ValueError(f"block_length must lie in 1..{held_out - 1}, got {block_length}.")
    train, validation, test = (
        _cut(part, block_length) for part in tokens.split([len(tokens) - 2 * held_out, held_out, held_out])
    )
    note = (
        f"Blocks of {block_length} characters; the last {HELD_OUT:.0%} are the test part, as many before it validation."
    )
    shape = (block_length,)
    return Dataset(name, ENTRIES[name].task, train, test, validation, classes, shape, "this package", notes=(note,))


def _cut(tokens: Tensor, length: int) -> Split:
    count = (len(tokens) - 1) // length  # the last character of a part is a target only
    x, y = (tokens[start : start + count * length].reshape(count, length) for start in (0, 1))
    return Split(x, y)

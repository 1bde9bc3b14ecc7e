"""What an optimizer holds, in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ocnopt.capture import Tape
from ocnopt.shards import local
from ocnopt.stock import Stock
from ocnopt.trees import tensors

_CATEGORY = {
    "momentum": "momentum",
    "second_moment": "adaptive curvature",
    "input_factor": "Kronecker factors",
    "output_factor": "Kronecker factors",
    "next_input_factor": "Kronecker factors",
    "next_output_factor": "Kronecker factors",
    "input_basis": "eigenbases",
    "output_basis": "eigenbases",
    "eigenvalues": "eigenbases",
}


def usage(state: Mapping[Tensor, Mapping[str, Any]], tape: Tape | None, stock: Stock) -> dict[str, int]:
    """By category, the ones that hold nothing left out. Memory that several tensors share is counted once."""
    held: dict[str, list[Tensor]] = {}
    for own in state.values():
        for key, value in own.items():
            held.setdefault(_CATEGORY.get(key, "other state"), []).extend(tensors(value))
    if tape is not None:
        held["tape"] = list(_of_tape(tape))
    held["to be used again"] = stock.blocks
    seen: set[int] = set()
    sizes = {category: _bytes(theirs, seen) for category, theirs in held.items()}
    return {category: size for category, size in sizes.items() if size}


def _of_tape(tape: Tape) -> Iterator[Tensor]:
    for this in tape.passes:
        yield from tensors((this.args, dict(this.kwargs)))
        yield from (t for reading in (*this.D.values(), *this.readings.values()) for t in reading.tensors())
        yield from (t for each in this.accounts.values() if each.tally is not None for t in each.tally.tensors)
    if tape.folded is not None:
        yield from tape.folded.columns.values()
    for record in tape.records:
        yield from tensors((record.args, dict(record.kwargs), record.outputs, record.h, record.columns))
        yield from (t for reading in record.readings.values() for t in reading.tensors())


def _bytes(theirs: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for t in theirs:
        storage = local(t).untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total

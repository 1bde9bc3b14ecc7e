"""Is a forward pass a chain? The autograd graph between the calls of the layers tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: autograd nodes at the inputs and at the outputs of one call
Ends = tuple[list[Any], list[Any]]


def is_chain(calls: Sequence[Ends], outputs: Sequence[Any]) -> bool:
    """Does every call read what the call before it wrote, and nothing else? Then its input is the whole state.

    Calls without nodes at their outputs depend on nothing that is trained: they are part of the input.
    """
    calls = [ends for ends in calls if ends[1]]
    owner = {node: k for k, (_, nodes) in enumerate(calls) for node in nodes}
    reads = [_reached(nodes, owner) for nodes, _ in calls]
    path = all(read == ({k - 1} if k else set()) for k, read in enumerate(reads))
    return path and _reached(outputs, owner) == {len(calls) - 1}


def _reached(nodes: Sequence[Any], owner: Mapping[Any, int]) -> set[int]:
    """The calls whose outputs the autograd nodes depend on directly."""
    found: set[int] = set()
    seen: set[Any] = set()
    todo = [n for n in nodes if n is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in owner:
            found.add(owner[node])
        else:
            todo += [n for n, _ in node.next_functions if n is not None]
    return found

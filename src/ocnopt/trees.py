"""Tensors inside the arguments and results of modules.

Nearly all of these are a tensor or a tuple of tensors, and hooks see them at every call: plain containers are walked
here, whatever else torch knows how to take apart (named tuples, model outputs) by its pytree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Size, Tensor, strided
from torch.utils import _pytree

#: what holds none, and is left as it is
_NO_TENSORS = (bool, int, float, str, Size)


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in it, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    kind = type(tree)
    if tree is None or kind in _NO_TENSORS:
        return []
    if kind is not tuple and kind is not list and kind is not dict:
        return [t for t in _pytree.tree_leaves(tree) if isinstance(t, Tensor)]
    found: list[Tensor] = []
    for part in tree.values() if kind is dict else tree:
        if isinstance(part, Tensor):
            found.append(part)
        else:
            found += tensors(part)
    return found


def mapped(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same with every tensor changed, in order."""
    if isinstance(tree, Tensor):
        return change(tree)
    kind = type(tree)
    if kind is tuple:
        return tuple(mapped(change, part) for part in tree)
    if kind is list:
        return [mapped(change, part) for part in tree]
    if kind is dict:
        return {key: mapped(change, part) for key, part in tree.items()}
    if tree is None or kind in _NO_TENSORS:
        return tree
    return _pytree.tree_map_only(Tensor, change, tree)


def is_alone(t: Tensor, others: Iterable[Any]) -> bool:
    """Does no tensor in any of them share its memory? Of a sparse one nobody knows."""
    memory = _memory_of(t)
    return memory is not None and all(_memory_of(other) != memory for value in others for other in tensors(value))


def _memory_of(t: Tensor) -> int | None:
    return t.untyped_storage().data_ptr() if t.layout is strided else None

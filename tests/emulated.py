"""CUDA graphs on a CPU, as far as an optimizer can tell: a capture writes down operations and leaves no trace, a replay
runs them again on the same memory, whoever may have it by then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ocnopt import clockwork, recording


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


class Writing(TorchDispatchMode):
    """Writes operations down. What was there before is kept as it was, and known by its address alone."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.others: dict[int, tuple[torch.UntypedStorage, Tensor, torch.Size]] = {}  # memory of others: see `_known`
        self._before: list[tuple[Tensor, Tensor]] = []
        self._written_to: set[int] = set()
        self._made: set[int] = set()
        self._alive: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        if func is torch.ops.aten.lift_fresh.default:
            self._make(args)
        for t in self._written(func, args, kwargs):
            if _memory(t) not in self._made | self._written_to:
                self._written_to.add(_memory(t))
                whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
                self._before.append((whole, whole.clone()))
        given = {_memory(t) for t in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        self._make([t for t in _tensors(out) if _memory(t) not in given])
        self.operations.append((func, *tree_map(self._known, (args, kwargs, out))))
        return out

    def _make(self, tree: Any) -> None:
        """It belongs to the graph, and lives as long as that."""
        for t in _tensors(tree):
            self._made.add(_memory(t))
            self._alive.append(t)

    def _known(self, t: Any) -> Any:
        """As a graph knows it: memory of others by its address, which keeps nobody from giving it back."""
        if not isinstance(t, Tensor) or not t.untyped_storage().nbytes() or _memory(t) in self._made:
            return t
        storage = t.untyped_storage()
        if _memory(t) not in self.others:
            raw = (ctypes.c_char * storage.nbytes()).from_address(_memory(t))
            self.others[_memory(t)] = storage, torch.frombuffer(raw, dtype=torch.uint8), t.shape
        raw_storage = self.others[_memory(t)][1].untyped_storage()
        with _disable_current_modes():
            return torch.empty(0, dtype=t.dtype).set_(raw_storage, t.storage_offset(), t.shape, t.stride())

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        named = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        places = {a.name: i for i, a in enumerate(func._schema.arguments)}
        return _tensors([args[places[a.name]] if places[a.name] < len(args) else kwargs.get(a.name) for a in named])

    def undo(self) -> None:
        for now, before in self._before:
            now.copy_(before)
        self._before.clear()


def _memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


class Graph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    replays = 0

    def __init__(self) -> None:
        self.writing = Writing()

    def replay(self) -> None:
        Graph.replays += 1
        for storage, _, shape in self.writing.others.values():
            # here it is held on to for this question; on a GPU it would be somebody else's by now
            assert torch._C._storage_Use_Count(storage._cdata) > 1, f"memory of {shape} is read that was given back"
        with torch.no_grad():
            for func, args, kwargs, out in self.writing.operations:
                again = func(*args, **kwargs)
                if any(r.alias_info is not None for r in func._schema.returns) or func._schema.is_mutable:
                    continue  # a view of what is there, or that itself
                for place, value in zip(_tensors(out), _tensors(again), strict=True):
                    place.data.copy_(value)


@contextmanager
def _capture(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    try:
        with graph.writing:
            yield
    finally:
        graph.writing.undo()


class Nothing:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clockwork, "why_never", lambda model, opt: None)
    monkeypatch.setattr(recording, "_mend", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", _capture)
    for name in ("Stream", "current_stream", "set_stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, Nothing)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)

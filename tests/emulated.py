"""CUDA graphs on a CPU, as far as an optimizer can tell: a capture writes down operations and leaves no trace, a replay
runs them again on the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ocnopt import clockwork, recording


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


class Writing(TorchDispatchMode):
    """Writes operations down. What was there before is kept as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._made: set[int] = set()
        self._alive: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        for t in self._written(func, args, kwargs):
            key = t.untyped_storage().data_ptr()
            if key not in self._made and key not in self._before:
                whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
                self._before[key] = whole, whole.clone()
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        for t in _tensors(out):
            self._alive.append(t)
            if t.untyped_storage().data_ptr() not in given:
                self._made.add(t.untyped_storage().data_ptr())
        self.operations.append((func, args, kwargs, out))
        return out

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        named = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        places = {a.name: i for i, a in enumerate(func._schema.arguments)}
        return _tensors([args[places[a.name]] if places[a.name] < len(args) else kwargs.get(a.name) for a in named])

    def undo(self) -> None:
        for now, before in self._before.values():
            now.copy_(before)


class Graph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    replays = 0

    def __init__(self) -> None:
        self.writing = Writing()

    def replay(self) -> None:
        Graph.replays += 1
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

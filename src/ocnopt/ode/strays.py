"""Layers inside a block that somebody else calls, too: the look along the solve does not see what they do there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ocnopt import layers
from ocnopt.hooks import Hook


class Strays:
    """Notes calls of layers that do not come from the block, as long as an optimizer watches it."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._expected = False
        self._watchers: set[int] = set()
        self._handles: list[RemovableHandle] = []

    def __getstate__(self) -> dict[str, Any]:  # of a copy or a pickle, which nobody watches
        return vars(Strays())

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Whatever is called meanwhile, the block calls it."""
        before, self._expected = self._expected, True
        try:
            yield
        finally:
            self._expected = before

    def watch(self, block: nn.Module, optimizer: object) -> None:
        self._watchers.add(id(optimizer))
        if self._handles:
            return
        for path, module in block.named_modules():
            if path and layers.find(module)[0] is not None:
                self._handles.append(module.register_forward_pre_hook(Hook(self._noting(path))))

    def leave(self, optimizer: object) -> None:
        self._watchers.discard(id(optimizer))
        if not self._watchers:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def _noting(self, path: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            # inside a backward pass it is activation checkpointing, run again
            if not self._expected and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                self.seen.add(path)

        return note

    def take(self) -> frozenset[str]:
        taken, self.seen = frozenset(self.seen), set()
        return taken

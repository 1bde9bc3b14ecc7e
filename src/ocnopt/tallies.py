"""Calls that are added up before the step, where it reads nothing but sums of them.

A layer that is used a hundred times in a pass, by a recurrent network or along an ODE, would keep a hundred inputs and
adjoints until the step. Its calls are kept as they are until they hold more than their sums would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ocnopt.curvature import tally
from ocnopt.curvature.tally import Tally
from ocnopt.layers.base import Adapter, Call

if TYPE_CHECKING:
    from ocnopt.records import Record


class Account:
    """The calls of one layer in one forward pass."""

    def __init__(self, adapter: Adapter, module: nn.Module, batch: int, continuous: bool) -> None:
        self.adapter, self.module, self.batch, self.continuous = adapter, module, batch, continuous
        self.tally: Tally | None = None
        self._pending: list[tuple[Sequence[Call], Callable[[Tally], None]]] = []
        self._held, self._limit = 0, tally.numbers(adapter, module, batch)

    def add(self, calls: Sequence[Call], release: Callable[[Tally], None]) -> None:
        """``release``: called once they are in the tally, and need not be kept any more."""
        self._pending.append((calls, release))
        self._held += sum(call.x.numel() + call.h.numel() for call in calls)
        often = self.tally is not None or len(self._pending) > 1  # what is used once is read once, by the step
        if often and self._held > self._limit:
            self.tally = self.tally or Tally(self.adapter, self.module, self.batch, self.continuous)
            self.settle()

    def finish(self, scale: Tensor | None) -> None:
        """The step is about to read what the backward pass left, with adjoints multiplied by ``scale`` since then."""
        self.settle()
        if self.tally is not None:
            self.tally.scale = scale

    def settle(self) -> None:
        """What there is of a layer is in one place: if there is a tally, all is."""
        if self.tally is None or not self._pending:
            return
        self.tally.add([calls for calls, _ in self._pending])
        for _, release in self._pending:
            release(self.tally)
        self._pending, self._held = [], 0


def add_up(record: Record, adapter: Adapter) -> None:
    """The call of a layer has its adjoint."""
    call = record.call(scaled=False)
    if record.overwritten() or not _fits([call], adapter, record.origin.batch):
        return  # it stays for the step to see

    def release(total: Tally) -> None:
        record.let_go()
        record.tallies[""] = total

    _account(record, "", adapter, record.module).add([call], release)


def add_up_inside(record: Record, path: str, adapter: Adapter, layer: nn.Module) -> None:
    """A host has told what a layer inside it saw."""
    assert record.inner is not None
    inner, calls = record.inner, record.inner.get(path, [])
    if not _fits(calls, adapter, record.origin.batch):
        return

    def release(total: Tally) -> None:
        inner[path] = []
        record.tallies[path] = total

    _account(record, path, adapter, layer).add(calls, release)


def _account(record: Record, path: str, adapter: Adapter, layer: nn.Module) -> Account:
    accounts, key, batch = record.origin.accounts, (record.name, path), record.origin.batch
    assert batch is not None
    if key not in accounts:
        accounts[key] = Account(adapter, layer, batch, continuous=bool(path))
    return accounts[key]


def _fits(calls: Sequence[Call], adapter: Adapter, batch: int | None) -> bool:
    """Can these calls be read sample by sample, as far as they tell themselves?"""
    if not calls or not batch:
        return False
    if any(adapter.call_refusal(call) is not None for call in calls):
        return False
    return all(t.shape[0] == batch for call in calls for t in (call.x, call.h))


def graph_is_kept() -> bool:
    """Can another backward pass come through the graph of this one, and add to its adjoints?"""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept

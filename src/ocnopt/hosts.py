"""Modules that run the layers inside them many times in one call, and are asked afterwards what the layers saw.

To the engine a host is one module: everything inside it acts before it runs, and what it changes is measured at its
own inputs and outputs. Only where curvature or groups of samples need the calls of single layers is the host asked
for them, and an ODE solve, say, answers with a few weighted calls, however many evaluations it took.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ocnopt.layers.base import Call
from ocnopt.tallies import add_up_inside

if TYPE_CHECKING:
    from ocnopt.players import Player
    from ocnopt.records import Record


@dataclass
class Execution:
    """One call of a host: its arguments, its floating-point outputs and ∂L/∂(output), both by position."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Mapping[int, Tensor]
    h: Mapping[int, Tensor]
    autocast: torch.dtype | None = None
    overwritten: bool = False  # were the arguments changed in place since the call?
    training: bool | None = None  # the mode in which the host was, if it is known
    of: int = 1  # how many executions of the host there were in the same pass, this one included


class CannotTell(Exception):
    """Raised by a host that cannot say what its layers saw. The message completes *the host …: message*."""


class Host(nn.Module, ABC):
    """Base class of such modules."""

    #: its name in the model that an optimizer watches
    known_as: str | None = None

    @abstractmethod
    def layer_calls(self, execution: Execution, layers: Mapping[str, nn.Module]) -> dict[str, list[Call]]:
        """What the layers, given by their names inside the host, saw in that execution.

        Of calls with a ``duration`` the gradient of the layer is Σ duration · (gradient of the call). Asked for after
        the backward pass and before any parameter changes; must leave no trace.
        """

    def take_strays(self) -> frozenset[str]:
        """The layers inside that somebody else has called, to train them, since this was last asked."""
        return frozenset()

    def attached(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """An optimizer begins to watch the model in which this host is called ``name``."""
        self.known_as = name or type(self).__name__

    def detached(self, optimizer: torch.optim.Optimizer) -> None:
        """It watches no more."""


def ask(
    records: Sequence[Record], players: Sequence[Player], split: bool, due: Callable[[Player], bool]
) -> dict[str, str]:
    """Let hosts fill in ``Record.inner`` where a player inside needs it. Returns those that could not tell, and why.

    ``split``: all of them are needed, for groups of samples. ``due``: does this player need them for its curvature?
    """
    failed: dict[str, str] = {}
    hosts = {id(r.module): r.module for r in records if isinstance(r.module, Host)}
    strays = {i: host.take_strays() for i, host in hosts.items()}
    executions = Counter((r.name, r.origin) for r in records)
    for record in records:
        if not isinstance(record.module, Host):
            continue
        record.strays = strays[id(record.module)]
        inside = [p for p in players if record.name in p.module_names and (split or p.curvature.needs_model)]
        layers = {
            use.path: use.module
            for p in inside
            for uses in p.uses
            for use in uses
            if use.module_name == record.name and use.adapter is not None
        }
        if not layers or not (split or any(map(due, inside))):
            continue
        # a batch that is bad or empty: the step will leave no trace
        if not all(h.numel() and bool(h.isfinite().all()) for h in record.h.values()):
            continue
        try:
            execution = replace(record.execution(), of=executions[record.name, record.origin])
            record.inner = record.module.layer_calls(execution, layers)
            if not split:
                _add_up(record, inside)
        except CannotTell as why:
            failed[record.name] = str(why)
            name = record.module.known_as or record.name
            warnings.warn(f"{name}: what its layers saw is not known: {why}", stacklevel=2)
    for account in (a for r in records if r.inner is not None for a in r.origin.accounts.values()):
        account.settle()
    return failed


def _add_up(record: Record, players: Sequence[Player]) -> None:
    """One execution is done with before the next is asked for, where sums will do."""
    for player in (p for p in players if p.curvature.takes_tallies):
        use = player.uses[0][0]  # the only one
        assert use.adapter is not None
        add_up_inside(record, use.path, use.adapter, use.module)


def is_continuous(model: nn.Module) -> bool:
    """Is there a host in it, such as a Neural ODE?"""
    return any(isinstance(module, Host) for module in model.modules())

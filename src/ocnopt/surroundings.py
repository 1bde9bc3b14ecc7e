"""What a graph of a step has frozen, and nobody copies: where tensors are that it reads, and what layers are set to."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ocnopt import clockwork
from ocnopt.anatomy import modules_of
from ocnopt.entries import PLAIN, Entries

if TYPE_CHECKING:
    from ocnopt.optimizer import OCNOpt


class Surroundings:
    """Held on to, so that what stands at an address stays what it is."""

    def __init__(self, opt: OCNOpt, params: list[Tensor]) -> None:
        modules = [] if opt._model is None or opt._tape is None else modules_of(opt._model)
        stores: list[dict[str, Any]] = [store for m in modules for store in (m._parameters, m._buffers)]
        places = [(store, name) for store in stores for name in store]
        states = [(own, name) for own, name, _ in clockwork.tensors_of_state(opt, params)]
        self._places = Entries([*places, *states])
        there = {id(t): t for t in (*params, *self._places.values) if isinstance(t, Tensor)}
        self._tensors, self._addresses = list(there.values()), _addresses(there.values())
        self._params, self._states = params, [opt.state.get(p) for p in params]
        players = [] if opt._tape is None else [vars(module) for module in opt._tape.modules.values()]
        # others are modules, parameters and hooks, which are looked at elsewhere
        settings = [(own, name) for own in players for name, value in own.items() if isinstance(value, PLAIN)]
        self._settings, self._players = Entries(settings), players
        self._forwards = self._forward()

    def hold(self, opt: OCNOpt) -> bool:
        """Is everything as it was?"""
        return (
            _addresses(self._tensors) == self._addresses
            and all(map(is_, map(opt.state.get, self._params), self._states))
            and self._places.untouched()
            and self._settings.unchanged()
            and self._forward() == self._forwards
        )

    def _forward(self) -> list[Any]:
        """Somebody may put another function in its place."""
        return [own.get("forward") for own in self._players]


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return [*map(Tensor.data_ptr, tensors)]

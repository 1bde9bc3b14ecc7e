"""What a graph of a step has frozen, and nobody copies: where tensors are that it reads, and what layers are set to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ocnopt import clockwork
from ocnopt.anatomy import modules_of

if TYPE_CHECKING:
    from ocnopt.optimizer import OCNOpt

#: settings of modules that are compared; others are modules, parameters and hooks, which are looked at elsewhere
_PLAIN = (bool, int, float, str, tuple, type(None))


class Surroundings:
    """Held on to, so that what stands at an address stays what it is."""

    def __init__(self, opt: OCNOpt, params: list[Tensor]) -> None:
        modules = [] if opt._model is None or opt._tape is None else modules_of(opt._model)
        stores: list[dict[str, Any]] = [store for m in modules for store in (m._parameters, m._buffers)]
        places = [(store, name, value) for store in stores for name, value in store.items()]
        self._places = _Entries([*places, *clockwork.tensors_of_state(opt, params)])
        there = {id(t): t for t in (*params, *self._places.values) if isinstance(t, Tensor)}
        self._tensors, self._addresses = list(there.values()), _addresses(there.values())
        self._params, self._states = params, [opt.state.get(p) for p in params]
        players = [] if opt._tape is None else [vars(module) for module in opt._tape.modules.values()]
        settings = [(own, k, v) for own in players for k, v in own.items() if isinstance(v, _PLAIN)]
        # somebody may put another function in its place
        self._settings = _Entries([*settings, *((own, "forward", own.get("forward")) for own in players)])

    def hold(self, opt: OCNOpt) -> bool:
        """Is everything as it was?"""
        return (
            _addresses(self._tensors) == self._addresses
            and all(map(is_, map(opt.state.get, self._params), self._states))
            and all(map(is_, self._places.now(), self._places.values))
            and self._settings.now() == self._settings.values
        )


class _Entries:
    """Entries of dictionaries, as they were; many, and looked at in every step, without a loop in Python."""

    def __init__(self, entries: Sequence[tuple[dict[str, Any], str, Any]]) -> None:
        self._owners, self._names = [owner for owner, _, _ in entries], [name for _, name, _ in entries]
        self.values = [value for _, _, value in entries]

    def now(self) -> list[Any]:
        return [*map(dict.get, self._owners, self._names)]


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return [*map(Tensor.data_ptr, tensors)]

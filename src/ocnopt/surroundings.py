"""What a graph of a step has frozen, and nobody copies: where tensors are that it reads, and what layers are set to."""

from __future__ import annotations

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
        self._places = [(store, name, value) for store in stores for name, value in store.items()]
        self._places += [(own, key, t) for own, key, t in clockwork.tensors_of_state(opt, params)]
        there = {id(t): t for t in (*params, *(value for _, _, value in self._places)) if isinstance(t, Tensor)}
        self._addresses = [(t, t.data_ptr()) for t in there.values()]
        self._state = [(p, opt.state.get(p)) for p in params]
        players = [] if opt._tape is None else [vars(module) for module in opt._tape.modules.values()]
        self._settings = [(own, k, v) for own in players for k, v in own.items() if isinstance(v, _PLAIN)]
        # somebody may put another function in its place
        self._settings += [(own, "forward", own.get("forward")) for own in players]

    def hold(self, opt: OCNOpt) -> bool:
        """Is everything as it was?"""
        state = opt.state
        return (
            all(t.data_ptr() == address for t, address in self._addresses)
            and all(state.get(p) is own for p, own in self._state)
            and all(store.get(name) is value for store, name, value in self._places)
            and all(own.get(name) is value or own.get(name) == value for own, name, value in self._settings)
        )

"""Models of which their modules tell what a pass is going to do.

Code of others may do something else at each pass, so what it does is looked at, operation by operation. torch's own
layers, activations and poolings have no such code, and that of a residual block, say, mostly leaves it no choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import (
    activation,
    batchnorm,
    conv,
    dropout,
    flatten,
    instancenorm,
    linear,
    normalization,
    padding,
    pixelshuffle,
    pooling,
    upsampling,
)
from torch.nn.modules import module as torch_module

from ocnopt.anatomy import Anatomy, modules_of
from ocnopt.entries import Entries
from ocnopt.games.flow import Flow, Mode
from ocnopt.games.plain import Code, has_no_choice, is_constant, kinds_of, settings_of

_ROOMS = (
    activation, batchnorm, conv, dropout, flatten, instancenorm, linear, normalization, padding, pixelshuffle, pooling,
    upsampling,
)  # fmt: skip
#: what each of them does to its input follows from its settings, its parameters and its mode
_KNOWN: frozenset[type] = frozenset(
    kind
    for room in _ROOMS
    for kind in (getattr(room, name) for name in room.__all__)
    if isinstance(kind, type) and not issubclass(kind, (nn.MultiheadAttention, nn.modules.lazy.LazyModuleMixin))
) | {nn.Sequential, nn.Identity, nn.ModuleList, nn.ModuleDict}


class Settled:
    """The settings of such a model at one moment, its code, and what it is to run under."""

    def __init__(
        self, anatomy: Anatomy, device: str, settings: list[dict[str, Any]], stores: list[Any], code: Code | None
    ) -> None:
        """``settings``: of each module. ``stores``: of what code asks for by name."""
        self._anatomy, self._device, self._stores, self._code = anatomy, device, stores, code
        self._owners = [vars(module) for module in anatomy.modules]
        pairs = zip(self._owners, settings, strict=True)
        self._settings = Entries([(own, name) for own, theirs in pairs for name in theirs if is_constant(theirs[name])])
        names = set() if code is None else code.names
        self._asked = Entries([(own, name) for own in self._owners for name in names & own.keys()])
        self._tensors = [p for p in anatomy.parameters if p.dim() > 1]
        places = *self._owners, vars(torch_module)
        self._hooks = [
            own[name] for own in places for name in own if name.endswith(("backward_hooks", "backward_pre_hooks"))
        ]
        self._kinds = kinds_of(anatomy.modules)
        self._known = self._now()

    @classmethod
    def of(cls, anatomy: Anatomy, device: str, players: Iterable[nn.Module]) -> Settled | None:
        """``None`` where code may choose what it does, or a setting can be changed without being replaced.

        ``players``: whose insides nobody looks at.
        """
        if not all(type(part) in _KNOWN for player in players for part in modules_of(player)):
            return None
        others = [module for module in anatomy.modules if type(module) not in _KNOWN]
        settings = [settings_of(module) for module in anatomy.modules]
        torchs = [own for module, own in zip(anatomy.modules, settings, strict=True) if type(module) in _KNOWN]
        if not all(is_constant(value) for own in torchs for value in own.values()):
            return None
        if not others:
            return cls(anatomy, device, settings, [], None)
        code = Code(others, anatomy.tensors)
        holders = [module for module in anatomy.modules if type(module) is not nn.Sequential]
        stores = [store for m in holders for store in (m._modules, m._parameters, m._buffers) if store]
        given = chain.from_iterable([own.items() for own in settings])
        sure = code.is_plain and code.asks_only_for(chain.from_iterable(stores), given)
        return cls(anatomy, device, settings, stores, code) if sure else None

    def tells(self, flow: Flow) -> bool:
        """Is that what it is going to do whenever it is so set? It is what it did once."""
        return not flow.constants and (self._code is None or has_no_choice(flow))

    def holds(self, anatomy: Anatomy) -> bool:
        """Are these the same modules, is all as it was, and does nobody come between them in the backward pass?"""
        return (
            anatomy is self._anatomy
            and not any(self._hooks)
            and self._now() == self._known
            and self._settings.unchanged()
            and self._asked.untouched()  # code may tell 1 from 1.0 and from True
            and (self._code is None or self._code.holds())
        )

    def _now(self) -> list[Any]:
        modes = Mode.now(self._device), nn.Module.__call__
        sizes = map(len, self._owners)  # what is new, such as another ``forward``, makes one larger
        forwards = [kind.forward for kind in self._kinds]
        names = chain.from_iterable(self._stores)  # by which code asks for modules and tensors
        strides = map(Tensor.stride, self._tensors)  # they tell whether something is a view or a copy
        return [*modes, *sizes, *map(type, self._anatomy.modules), *forwards, *names, *strides, *vars(F).values()]

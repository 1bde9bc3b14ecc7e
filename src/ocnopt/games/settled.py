"""Models of which their modules tell what a pass is going to do.

Code of others may do something else at each pass, so what it does is looked at, operation by operation. torch's own
layers, activations and poolings have no such code, and that of a residual block, say, mostly leaves it no choice.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
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

from ocnopt.anatomy import Anatomy, modules_of
from ocnopt.entries import PLAIN, Entries
from ocnopt.games.flow import Flow, Mode
from ocnopt.games.plain import Code, has_constants_only, has_no_choice

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
) | {nn.Sequential, nn.Identity, nn.ModuleList}


class Settled:
    """The settings of such a model at one moment, its code, and what it is to run under."""

    def __init__(self, anatomy: Anatomy, device: str, code: Code | None) -> None:
        self._anatomy, self._device, self._mode, self._code = anatomy, device, Mode.now(device), code
        self._owners = [vars(module) for module in anatomy.modules]
        self._sizes = [*map(len, self._owners)]  # what is new, such as another ``forward``, makes one larger
        settings = [(own, name) for own in self._owners for name, value in own.items() if isinstance(value, PLAIN)]
        self._settings = Entries(settings)

    @classmethod
    def of(cls, anatomy: Anatomy, device: str, players: Iterable[nn.Module]) -> Settled | None:
        """``None`` where code may choose what it does, or a setting can be changed without being replaced.

        ``players``: whose insides nobody looks at.
        """
        if not all(type(part) in _KNOWN for player in players for part in modules_of(player)):
            return None
        others = [module for module in anatomy.modules if type(module) not in _KNOWN]
        settings = (vars(module).items() for module in anatomy.modules)
        plain = all(isinstance(value, PLAIN) for own in settings for name, value in own if not name.startswith("_"))
        if not plain or not all(map(has_constants_only, others)):
            return None
        code = Code(others) if others else None
        return cls(anatomy, device, code) if code is None or code.is_plain else None

    def tells(self, flow: Flow) -> bool:
        """Is that what it is going to do whenever it is so set? It is what it did once."""
        return not flow.constants and (self._code is None or has_no_choice(flow))

    def holds(self, anatomy: Anatomy) -> bool:
        """Are these the same modules, and is all as it was?"""
        same = anatomy is self._anatomy and Mode.now(self._device) == self._mode
        same = same and (self._code is None or self._code.holds())
        return same and [*map(len, self._owners)] == self._sizes and self._settings.unchanged()

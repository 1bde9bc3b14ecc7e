"""Models that are made of torch's own modules alone: how these are set tells what a pass is going to do.

Code of others may do something else at each pass, so what it does is looked at, operation by operation. A chain of
layers, activations and poolings of torch's has no such code.
"""

from __future__ import annotations

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

from ocnopt.anatomy import Anatomy
from ocnopt.entries import PLAIN, Entries
from ocnopt.games.flow import Mode

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
) | {nn.Sequential}


class Settled:
    """The settings of such a model at one moment, and what it is to run under."""

    def __init__(self, anatomy: Anatomy, device: str) -> None:
        self._anatomy, self._device, self._mode = anatomy, device, Mode.now(device)
        self._owners = [vars(module) for module in anatomy.modules]
        self._sizes = [*map(len, self._owners)]  # what is new, such as another ``forward``, makes one larger
        self._settings = Entries([(own, name) for own in self._owners for name in own if not name.startswith("_")])

    @classmethod
    def of(cls, anatomy: Anatomy, device: str) -> Settled | None:
        """``None`` where somebody else's code may have a say, or a setting can be changed without being replaced."""
        if not all(type(module) in _KNOWN for module in anatomy.modules):
            return None
        settings = (vars(module).items() for module in anatomy.modules)
        plain = all(isinstance(value, PLAIN) for own in settings for name, value in own if not name.startswith("_"))
        return cls(anatomy, device) if plain else None

    def holds(self, anatomy: Anatomy) -> bool:
        """Are these the same modules, and is all as it was?"""
        same = anatomy is self._anatomy and Mode.now(self._device) == self._mode
        return same and [*map(len, self._owners)] == self._sizes and self._settings.unchanged()

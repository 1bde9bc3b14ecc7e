"""The modules of a model and the tensors that they hold.

torch's own ways to walk a model know every name on the way. Hooks walk it several times a step, and need none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn


class Anatomy:
    """Of a model at one moment, and as long as it :meth:`holds`."""

    def __init__(self, modules: list[nn.Module]) -> None:
        """``modules``: each once, in torch's order."""
        self.modules = modules
        owners = [m._parameters for m in modules if m._parameters]
        #: each once
        self.parameters = list({id(p): p for own in owners for p in own.values() if p is not None}.values())
        #: with their places
        self.buffers: list[tuple[dict[str, Any], str, Tensor | None]] = [
            (m._buffers, name, b) for m in modules if m._buffers for name, b in m._buffers.items()
        ]
        self._parts = _parts(modules)
        #: parameters and buffers
        self.tensors: list[Tensor] = [*self.parameters, *(b for _, _, b in self.buffers if b is not None)]
        self.places = Places()
        self._look()

    @classmethod
    def of(cls, model: nn.Module, known: Anatomy | None = None) -> Anatomy:
        """``known``: that of a moment before, which is mostly the same."""
        if known is not None and known.modules[0] is model and known.holds():
            known._look()
            return known
        return cls(modules_of(model))

    def holds(self) -> bool:
        """Does the model consist of the same modules, with the same tensors in their places?"""
        return _parts(self.modules) == self._parts

    def _look(self) -> None:
        """A model may be moved: its tensors stay the same, their numbers do not."""
        found = {*map(Tensor.get_device, self.tensors)}, self.tensors[0].device if self.tensors else None
        if self.places.found != found:
            self.places = Places(found, self.parameters, [b for _, _, b in self.buffers if b is not None])


class Places:
    """What there is on which device.

    Attributes:
        devices: of the parameters.
        kinds: of device, of the buffers too.
        alike: the buffers, by device and dtype, and whether they are plain tensors.
    """

    def __init__(self, found: Any = None, parameters: Sequence[Tensor] = (), buffers: Sequence[Tensor] = ()) -> None:
        self.found = found
        self.devices = {p.device for p in parameters}
        self.kinds = sorted({device.type for device in self.devices} | {b.device.type for b in buffers})
        alike: dict[Any, list[Tensor]] = {}
        for b in buffers:
            alike.setdefault((b.device, b.dtype), []).append(b)
        self.alike = [(theirs, all(map(_is_plain, theirs))) for theirs in alike.values()]


def _is_plain(t: Tensor) -> bool:
    return type(t) is Tensor and t.layout is torch.strided and not t.is_quantized


_held = attrgetter("_modules", "_parameters", "_buffers")


def _parts(modules: list[nn.Module]) -> tuple[list[Any], ...]:
    """What modules hold: how much each, which objects, and which names the buffers have. Few steps in Python: the whole
    model is looked at in every pass.
    """
    held: list[dict[str, Any]] = [*chain.from_iterable(map(_held, modules))]
    objects = chain.from_iterable([own.values() for own in held if own])
    return [*map(len, held)], [*map(id, objects)], [*chain.from_iterable(filter(None, held[2::3]))]


def modules_of(model: nn.Module) -> list[nn.Module]:
    """As ``model.modules()``."""
    found: dict[nn.Module, None] = {}
    todo = [model]
    while todo:
        module = todo.pop()
        if module not in found:
            found[module] = None
            if children := module._modules:
                todo += [child for child in reversed(children.values()) if child is not None]
    return list(found)

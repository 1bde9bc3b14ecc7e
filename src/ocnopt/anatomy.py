"""The modules of a model and the tensors that they hold.

torch's own ways to walk a model know every name on the way. Hooks walk it several times a step, and need none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Anatomy:
    """Of a model at one moment."""

    modules: list[nn.Module]  # each once, in torch's order

    @classmethod
    def of(cls, model: nn.Module) -> Anatomy:
        return cls(modules_of(model))

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Each once."""
        owners = [m._parameters for m in self.modules if m._parameters]
        return list({id(p): p for own in owners for p in own.values() if p is not None}.values())

    @cached_property
    def buffers(self) -> list[tuple[dict[str, Any], str, Tensor | None]]:
        """With their places."""
        return [(m._buffers, name, b) for m in self.modules if m._buffers for name, b in m._buffers.items()]

    @cached_property
    def devices(self) -> set[torch.device]:
        """Of the parameters."""
        return {p.device for p in self.parameters}


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

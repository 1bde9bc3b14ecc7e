"""What is trained: networks of a given size, with one random batch of their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt.lab import models
from ocnopt.lab.schema import ConfigError


@dataclass(frozen=True)
class Network:
    """A network of the lab.

    Attributes:
        kind: its name there.
        shape, classes: of its samples.
        options: what is set beside the lab's defaults.
        sizes: ways in which it can grow: option of the network, and the values to try.
    """

    kind: str
    shape: tuple[int, ...]
    classes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def build(self) -> nn.Module:
        return models.build(self.kind, self.shape, self.classes, **self.options)

    def sample(self, batch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        if self.kind in models.READ_TEXT:
            x = torch.randint(self.classes, (batch, *self.shape), generator=generator)
            return x, x.roll(-1, 1)
        x = torch.randn(batch, *self.shape, generator=generator)
        return x, torch.randint(self.classes, (batch,), generator=generator)

    def grown(self, way: str, size: int) -> Network:
        return replace(self, options={**self.options, self.sizes[way][0]: size})


NETWORKS = {
    "cnn": Network("cnn", (1, 28, 28), 10, sizes={"width": ("channels", (8, 16, 32, 64))}),
    "resnet18": Network("resnet18", (3, 32, 32), 100),
    "transformer": Network(
        "gpt",
        (64,),
        256,
        {"layers": 6, "width": 256, "heads": 4},
        {"depth": ("layers", (2, 4, 8, 16)), "width": ("width", (64, 128, 256, 512))},
    ),
    "fcn": Network(
        "fcn",
        (256,),
        10,
        {"depth": 6, "width": 256},
        {"depth": ("depth", (4, 8, 16, 32)), "width": ("width", (128, 256, 512, 1024))},
    ),
}


def find(name: str) -> Network:
    if name not in NETWORKS:
        raise ConfigError(f"network must be one of {', '.join(NETWORKS)}; got {name!r}")
    return NETWORKS[name]


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    """Cross entropy over the samples, and over the places of a text."""
    return cross_entropy(output.flatten(0, -2), y.flatten())

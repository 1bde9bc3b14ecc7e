"""Networks whose layers run one after another."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

Shape = tuple[int, ...]

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "softplus": nn.Softplus}


def activation_of(name: str) -> type[nn.Module]:
    if name not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {name!r}")
    return ACTIVATIONS[name]


def image_size(input_shape: Shape, *, at_least: int) -> Shape:
    """``(channels, height, width)`` of an image that survives the network's pooling, or an error that says
    why not.
    """
    if len(input_shape) != 3:
        raise ValueError(f"input_shape must be (channels, height, width) for this network; got {input_shape}")
    if min(input_shape[1:]) < at_least:
        raise ValueError(f"input_shape must have height and width of at least {at_least}; got {input_shape}")
    return input_shape


def head(features: int, hidden: int, classes: int) -> list[nn.Module]:
    """The two fully-connected layers that close the paper's convolutional networks."""
    return [nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes)]


def fcn(
    input_shape: Shape, classes: int, *, width: int = 32, activation: str = "relu", depth: int = 5
) -> nn.Sequential:
    """``depth`` fully-connected layers with hidden layers of ``width`` units."""
    if depth < 1:
        raise ValueError(f"depth must be at least 1; got {depth}")
    act = activation_of(activation)
    sizes = [math.prod(input_shape), *[width] * (depth - 1), classes]
    layers: list[nn.Module] = [nn.Flatten()]
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), act()]
    return nn.Sequential(*layers[:-1])  # the logits are not activated


def cnn(input_shape: Shape, classes: int, *, channels: int = 32, hidden: int = 128) -> nn.Sequential:
    """Four 3×3 convolutions, then two fully-connected layers, ReLU throughout.

    Open in the paper, chosen here: padding 1, a 2×2 max-pool after each pair of convolutions, 128 hidden
    units.
    """
    n_in, height, width = image_size(input_shape, at_least=4)
    layers: list[nn.Module] = []
    for pair_in in (n_in, channels):
        layers += [nn.Conv2d(pair_in, channels, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, *head(channels * (height // 4) * (width // 4), hidden, classes))

"""The feed-forward networks that the benchmarks train."""

from __future__ import annotations

from itertools import pairwise

from torch import nn


def fcn(sizes: list[int], activation: type[nn.Module]) -> nn.Sequential:
    """Fully-connected layers `sizes[0] → … → sizes[-1]` with an activation between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def cnn(channels: int, side: int, classes: int = 10) -> nn.Sequential:
    """The paper's convolutional network: four 3x3 layers of 32 channels, two fully-connected layers, ReLU."""
    layers: list[nn.Module] = []
    for index in range(4):
        layers += [nn.Conv2d(channels if index == 0 else 32, 32, 3, padding=1), nn.ReLU()]
        if index % 2:
            layers.append(nn.MaxPool2d(2))
    features = 32 * (side // 4) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, classes))

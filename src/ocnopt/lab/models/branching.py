"""Networks with parallel paths: the paper's dynamic games (Sec. IV-D).

Each network is a chain of blocks; the branching is inside a block, which is one module.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ocnopt.lab.models.plain import Shape, head, image_size


class ResidualBlock(nn.Module):
    """The paper's Fig. "residual block": z_{k+2} = ReLU(f_{k+1} ∘ f_k ∘ f_{k-1}(z) + skip(z)), three 3×3
    convolutions on the path.

    The skip is a 1×1 convolution f(·, φ) where the block changes the shape (or when ``projection`` asks for
    it), and the identity otherwise.
    """

    def __init__(self, n_in: int, n_out: int, *, stride: int = 1, projection: bool | None = None) -> None:
        super().__init__()
        changes_shape = stride != 1 or n_in != n_out
        if projection is False and changes_shape:
            raise ValueError(
                f"projection must not be False where the shape changes ({n_in} to {n_out}, stride {stride})"
            )
        self.path = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1),
            nn.ReLU(),
            nn.Conv2d(n_out, n_out, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(n_out, n_out, 3, padding=1),
        )
        project = changes_shape if projection is None else projection
        self.skip: nn.Module = nn.Conv2d(n_in, n_out, 1, stride=stride) if project else nn.Identity()
        self.relu = nn.ReLU()

    def forward(self, z: Tensor) -> Tensor:
        merged: Tensor = self.relu(self.path(z) + self.skip(z))
        return merged


class InceptionBlock(nn.Module):
    """Parallel convolutions of different kernel sizes on the same input, concatenated: one player each."""

    def __init__(self, n_in: int, n_out_each: int, kernel_sizes: Sequence[int] = (1, 3, 5, 7)) -> None:
        super().__init__()
        self.paths = nn.ModuleList(nn.Conv2d(n_in, n_out_each, k, padding=k // 2) for k in kernel_sizes)
        self.relu = nn.ReLU()

    def forward(self, z: Tensor) -> Tensor:
        merged: Tensor = self.relu(torch.cat([path(z) for path in self.paths], dim=1))
        return merged


def residual(
    input_shape: Shape, classes: int, *, blocks: int = 3, channels: int = 32, projection: bool = False
) -> nn.Sequential:
    """A 3×3 convolution, ``blocks`` residual blocks, global average pooling, one fully-connected layer; no
    normalisation.

    Open in the paper, chosen here: the first block keeps its shape (identity skip, unless ``projection`` asks for a
    player there too); each later one halves the resolution and doubles the channels (projection skip).
    """
    if blocks < 1:
        raise ValueError(f"blocks must be at least 1; got {blocks}")
    n_in, _, _ = image_size(input_shape, at_least=2 ** (blocks - 1))
    layers: list[nn.Module] = [
        nn.Conv2d(n_in, channels, 3, padding=1),
        nn.ReLU(),
        ResidualBlock(channels, channels, projection=projection),
    ]
    for _ in range(blocks - 1):
        layers.append(ResidualBlock(channels, 2 * channels, stride=2))
        channels *= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def inception(input_shape: Shape, classes: int, *, channels: int = 32, hidden: int = 128) -> nn.Sequential:
    """Convolution, inception block with four paths, convolution, two fully-connected layers.

    Open in the paper, chosen here: kernels 1, 3, 5 and 7 with ``channels / 2`` channels each, a 2×2 max-pool
    before the block and one after the last convolution, 128 hidden units.
    """
    if channels % 2:
        raise ValueError(f"channels must be even; got {channels}")
    n_in, height, width = image_size(input_shape, at_least=4)
    layers: list[nn.Module] = [
        nn.Conv2d(n_in, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        InceptionBlock(channels, channels // 2),
        nn.Conv2d(2 * channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(*layers, *head(channels * (height // 4) * (width // 4), hidden, classes))

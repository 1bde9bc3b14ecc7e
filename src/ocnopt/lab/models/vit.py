"""A vision transformer (Dosovitskiy et al. 2021), small."""

from __future__ import annotations

from torch import Tensor, nn

from ocnopt.lab.models.plain import Shape, image_size
from ocnopt.lab.models.transformer import transformer


class PatchEmbedding(nn.Module):
    """``[B, channels, height, width]`` to ``[B, patches, features]``: one linear map for all patches."""

    def __init__(self, channels: int, features: int, patch: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, features, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        patches: Tensor = self.project(images)
        return patches.flatten(2).transpose(1, 2)


class MeanOfPatches(nn.Module):
    """``[B, patches, features]`` to ``[B, features]``; takes the place of a class token."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def vit(
    input_shape: Shape, classes: int, *, patch: int = 4, layers: int = 4, width: int = 64, heads: int = 4
) -> nn.Sequential:
    """Patches of ``patch``×``patch`` pixels, pre-norm blocks, the mean over the patches, one fully-connected layer."""
    channels, height, wide = image_size(input_shape, at_least=1)
    if patch < 1 or height % patch or wide % patch:
        raise ValueError(f"patch must divide height and width; got {patch} for {height}×{wide} pixels")
    places = (height // patch) * (wide // patch)
    stream = transformer(places, width, layers, heads, causal=False)
    return nn.Sequential(PatchEmbedding(channels, width, patch), *stream, MeanOfPatches(), nn.Linear(width, classes))

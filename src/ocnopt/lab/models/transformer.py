"""Transformers: the blocks, and a language model made of them.

Queries, keys and values are three linear layers and not one: three players that act on the same state. Each block adds
two branches to the residual stream, which is part of the state throughout. The initial weights are torch's own;
those of GPT-2, normal with deviation 0.02, are for wide networks and cost narrow ones hundreds of steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ocnopt.lab.models.plain import Shape


class Attention(nn.Module):
    """Several heads; with ``causal``, a position sees itself and what comes before it."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"heads must divide width; got {heads} heads and width {width}")
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        merged: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return merged

    def _split(self, x: Tensor) -> Tensor:
        """``[B, T, width]`` to ``[B, heads, T, width / heads]``."""
        heads: Tensor = x.unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)


class TransformerBlock(nn.Module):
    """Attention, then two layers on each position, each behind a normalisation and beside an identity skip."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in, self.gelu, self.mlp_out = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        merged: Tensor = x + self.mlp_out(self.gelu(self.mlp_in(self.mlp_norm(x))))
        return merged


class AddPositions(nn.Module):
    """Adds what is learned about each place in a sequence."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.places = nn.Embedding(length, width)

    def forward(self, x: Tensor) -> Tensor:
        # one row of numbers for each sample: the gradient of a sample is then that of its own call
        numbers = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        placed: Tensor = x + self.places(numbers)
        return placed


def transformer(length: int, width: int, layers: int, heads: int, *, causal: bool) -> list[nn.Module]:
    """``[B, length, width]`` to the same: positions, blocks, and the normalisation that closes the residual stream."""
    if layers < 1:
        raise ValueError(f"layers must be at least 1; got {layers}")
    blocks = [TransformerBlock(width, heads, causal=causal) for _ in range(layers)]
    return [AddPositions(length, width), *blocks, nn.LayerNorm(width)]


def gpt(input_shape: Shape, classes: int, *, layers: int = 2, width: int = 64, heads: int = 4) -> nn.Sequential:
    """A decoder: ``[B, T]`` characters to ``[B, T, classes]`` logits, at each place of the character that comes next.

    Pre-norm, learned positions, no dropout; the head does not share its weight with the embedding.
    """
    if len(input_shape) != 1:
        raise ValueError(f"input_shape must be (length,) of a text for this network; got {input_shape}")
    stream = transformer(input_shape[0], width, layers, heads, causal=True)
    return nn.Sequential(nn.Embedding(classes, width), *stream, nn.Linear(width, classes))

"""scikit-learn's handwritten digits, split once; and how well a network does on the part it has not seen."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

TRAIN = 1437


@cache
def data() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    return x[order], torch.tensor(digits.target)[order]


def batches(size: int, steps: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = data()
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(TRAIN, generator=generator).split(size):
            if steps == 0:
                return
            steps -= 1
            yield x[rows], y[rows]


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    x, y = data()
    return float((model(x[TRAIN:]).argmax(1) == y[TRAIN:]).float().mean())

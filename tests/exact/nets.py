"""Small float64 networks, cut into the stages of the dense solver, with three mini-batches each.

A piece is a parametrised layer, a norm that follows it, and whatever follows without parameters, so that state k is the
input of the first layer of stage k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

B = 7  # not divisible by 3: groups of unequal size
RANKS: list[int | str] = [1, 3, "full"]
CLASSES = 3

Batch = tuple[Tensor, Tensor]


def rank_of(rank: int | str) -> int:
    return B if rank == "full" else int(rank)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(output.reshape(len(output), -1), targets)


@dataclass
class Net:
    pieces: list[nn.Module]
    batches: list[Batch]

    def __post_init__(self) -> None:
        self.model = nn.Sequential(*self.pieces).double()
        for p in self.model.parameters():
            if p.dim() == 1:  # norms start at ones and zeros, where mistakes do not show
                p.data += 0.3 * torch.randn_like(p)
            else:  # gradients large enough for the feedback to matter
                p.data *= 2


class Mean(nn.Module):
    """Over the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Scale(nn.Module):
    """A layer that no adapter knows."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def real(*shape: int) -> list[Batch]:
    """Three batches of random inputs."""
    return [(torch.randn(B, *shape, dtype=torch.float64), torch.randint(CLASSES, (B,))) for _ in range(3)]


def tokens(vocabulary: int, length: int) -> list[Batch]:
    return [(torch.randint(vocabulary, (B, length)), torch.randint(CLASSES, (B,))) for _ in range(3)]


def mlp() -> Net:
    pieces = [nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in pairwise([4, 5, 3, 4])]
    return Net([*pieces, nn.Linear(4, CLASSES)], real(4))


def convolution() -> Net:
    pieces = [
        nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh()),
        nn.Sequential(nn.Conv2d(3, 4, 2, padding=1), nn.Tanh(), nn.AvgPool2d(3), nn.Flatten()),
        nn.Linear(4, CLASSES),
    ]
    return Net(pieces, real(2, 4, 4))


def layer_norm() -> Net:
    pieces = [
        nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.GELU()),
        nn.Linear(5, CLASSES, bias=False),
    ]
    return Net(pieces, real(4))


def norms() -> Net:
    """The first has nobody to join; two join the same layer; the last is the last layer."""
    pieces = [
        nn.LayerNorm(4),
        nn.Sequential(nn.Linear(4, 5), nn.RMSNorm(5, eps=1e-3), nn.Tanh()),
        nn.Sequential(nn.Linear(5, 6), nn.GELU(), nn.GroupNorm(2, 6), nn.LayerNorm(6), nn.Tanh()),
        nn.Sequential(nn.Linear(6, CLASSES), nn.LayerNorm(CLASSES)),
    ]
    return Net(pieces, real(4))


def embedding() -> Net:
    pieces = [
        nn.Sequential(nn.Embedding(6, 4, padding_idx=5), Mean(), nn.Tanh()),
        nn.Sequential(nn.Linear(4, 5), nn.Tanh()),
        nn.Linear(5, CLASSES),
    ]
    return Net(pieces, tokens(6, 3))


def sequence() -> Net:
    pieces = [
        nn.Sequential(nn.Linear(4, 5), nn.Tanh()),
        nn.Sequential(nn.Linear(5, 4), nn.Tanh(), Mean()),
        nn.Linear(4, CLASSES),
    ]
    return Net(pieces, real(3, 4))


def batch_norm() -> Net:
    norm = nn.BatchNorm1d(5)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.uniform_(-0.5, 0.5)
    norm.running_var.uniform_(0.3, 2.0)
    pieces = [nn.Sequential(nn.Linear(4, 5), norm.eval(), nn.Tanh()), nn.Linear(5, CLASSES)]
    return Net(pieces, real(4))


def mixed() -> Net:
    pieces = [
        nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
            nn.SiLU(),
            nn.GroupNorm(2, 4),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Flatten(),
        ),
        nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.LayerNorm(5)),
        nn.Linear(5, CLASSES),
    ]
    return Net(pieces, real(2, 4, 4))


def words() -> Net:
    pieces = [
        nn.Sequential(nn.Embedding(6, 4), nn.LayerNorm(4)),
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), Mean()),
        nn.Linear(5, CLASSES),
    ]
    return Net(pieces, tokens(6, 3))


_BUILDERS: list[Callable[[], Net]] = [
    mlp,
    convolution,
    layer_norm,
    norms,
    embedding,
    sequence,
    batch_norm,
    mixed,
    words,
]
NETS = {build.__name__: build for build in _BUILDERS}


def make(name: str, seed: int = 1) -> Net:
    with seeded(seed):
        return NETS[name]()

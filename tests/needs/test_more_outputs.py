"""A layer with several outputs, more than one of which enters the loss."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.toys import CLASSES, name_of, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt

WIDTH, B, T = 4, 6, 3
WHY = "the loss depends on more than its first output"
GAMES: list[dict[str, Any]] = [
    {"curvature": "identity", "rank": 3},
    {"curvature": "adaptive", "rank": "full"},
    {"curvature": "kronecker", "rank": 3, "feedback": "nonlinear"},
]
games = pytest.mark.parametrize("game", GAMES, ids=name_of)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        x, weights = self.attention(x, x, x)
        return self.head(x.mean(1)), weights


def step(game: dict[str, Any], weight: float | None) -> tuple[Net, OCNOpt, list[str]]:
    """One step whose loss holds the attention weights, with a weight of their own, or not at all."""
    torch.manual_seed(0)
    model = Net().double()
    opt = OCNOpt(model.parameters(), 0.05, model=model, clamp=False, **game)
    x, y = torch.randn(B, T, WIDTH, dtype=torch.float64), torch.randint(CLASSES, (B,))
    output, weights = model(x)
    loss = cross_entropy(output, y)
    if weight is not None:
        loss = loss + weight * weights.square().sum()
    loss.backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    return model, opt, [str(w.message) for w in caught]


@games
def test_falls_back_loudly(game: dict[str, Any]) -> None:
    model, opt, said = step(game, 0.3)
    assert said
    assert all(m.startswith("attention.") and WHY in m for m in said)
    assert WHY in opt.summary()
    assert all(t.isfinite().all() for t in values(model))


def test_its_gradient_is_not_split() -> None:
    """Groups of equal size share it: what the adapter would make of the first output alone is not used."""
    _, opt, _ = step(GAMES[0], 0.3)
    names = [layer.name for layer in opt.diagnostics.layers]
    K = opt.diagnostics.kernels.K[names.index("attention")]
    torch.testing.assert_close(K, K.sum() * torch.full((3, 3), 1 / 9, dtype=torch.float64))


@games
def test_nothing_to_say_without_them(game: dict[str, Any]) -> None:
    _, opt, said = step(game, None)
    assert [m for m in said if WHY in m] == []
    assert WHY not in opt.summary()


@pytest.mark.parametrize("feedback", ["linear", "nonlinear"])
def test_at_rank_one_nothing_is_split_anyway(feedback: str) -> None:
    model, _, said = step({"curvature": "adaptive", "rank": 1, "feedback": feedback}, 0.3)
    assert said == []
    assert all(t.isfinite().all() for t in values(model))

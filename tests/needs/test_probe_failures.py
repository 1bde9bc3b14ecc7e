"""A model that does not run with its samples exchanged: said, and trained all the same."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.toys import CLASSES, FEATURES, assert_identical, name_of, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence

from ocnopt import OCNOpt

GAMES: list[dict[str, Any]] = [
    {"rank": 2},
    {"curvature": "kronecker"},
    {"curvature": "kronecker", "rank": 2, "feedback": "nonlinear"},
]
games = pytest.mark.parametrize("game", GAMES, ids=name_of)


class Sorted(nn.Module):
    """Wants the longest sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)
        self.norm = nn.BatchNorm1d(4)
        self.gru = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = nn.functional.dropout(self.embed(x), 0.1, self.training)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=True)
        return self.head(self.norm(self.gru(packed)[1][-1]))


def data(n: int = 6, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, n, FEATURES, generator=g, dtype=torch.float64)
    return x, torch.arange(n, 0, -1), torch.randint(CLASSES, (n,), generator=g)


def make(game: dict[str, Any], lr: float = 0.05) -> tuple[nn.Module, OCNOpt]:
    torch.manual_seed(0)
    model = Sorted().double()
    return model, OCNOpt(model.parameters(), lr, model=model, **game)


def step(model: nn.Module, opt: OCNOpt, n: int = 6) -> tuple[float, list[str]]:
    x, lengths, y = data(n)
    opt.zero_grad()
    loss = cross_entropy(model(x, lengths), y)
    loss.backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    return loss.item(), [str(w.message) for w in caught]


def of_the_probe(said: list[str]) -> list[str]:
    return [m for m in said if m.startswith("the model does not run with its samples exchanged (RuntimeError: ")]


@games
def test_is_said_once_with_the_reason_and_the_layers(game: dict[str, Any]) -> None:
    model, opt = make(game)
    _, said = step(model, opt)
    (message,) = of_the_probe(said)
    assert "sorted" in message
    for name in ("embed", "head"):
        assert any(m.startswith(name) and "does not run over the samples" in m for m in said)
    assert step(model, opt)[1] == []
    assert len(of_the_probe(step(model, opt, n=4)[1])) == 1, "another size of batch is another question"


@games
def test_trains(game: dict[str, Any]) -> None:
    model, opt = make(game)
    losses = [step(model, opt)[0] for _ in range(15)]
    assert losses[-1] < 0.8 * losses[0]
    assert "adaptive" in opt.summary()
    assert "kronecker" not in opt.summary()


@games
def test_leaves_no_trace(game: dict[str, Any]) -> None:
    """Random numbers, buffers and modes are as if nothing had been tried."""
    model, opt = make(game, lr=0.0)
    x, lengths, y = data()
    cross_entropy(model(x, lengths), y).backward()
    before, rng, modes = values(model), torch.get_rng_state(), [m.training for m in model.modules()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    assert len(of_the_probe([str(w.message) for w in caught])) == 1
    assert_identical(values(model), before)
    assert_identical(torch.get_rng_state(), rng)
    assert [m.training for m in model.modules()] == modes
    assert opt._tape is not None
    assert opt._tape.rollout is None

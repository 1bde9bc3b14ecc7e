"""A module that runs several times in one forward pass is one player; its gradients and statistics add up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import CLASSES, FEATURES, GAMES, SOME_GAMES, B, assert_identical, batches, name_of, train, values
from torch import Tensor, nn

from ocnopt import OCNOpt

CASES = [*GAMES, *({**game, "ekfac": False} for game in GAMES if game["curvature"] == "kronecker")]


class Unrolled(nn.Module):
    """A recurrent cell, run over a sequence."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.first, self.cell, self.head = nn.Linear(FEATURES, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.times):
            x = torch.tanh(self.cell(x))
        return self.head(x)


class Positions(nn.Module):
    """One layer at three positions, called once or three times."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once
        self.shared, self.head = nn.Linear(FEATURES, 4), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x, 2 * x, x.flip(1)]
        out = self.shared(torch.stack(parts, 1)) if self.at_once else torch.stack([self.shared(p) for p in parts], 1)
        return self.head(torch.tanh(out).flatten(1))


def run(model: nn.Module, steps: int = 3, **options: Any) -> tuple[list[Tensor], OCNOpt]:
    opt = OCNOpt(model.double().parameters(), 0.1, model=model, **options)
    train(model, opt, batches(steps))
    return values(model), opt


@pytest.mark.parametrize("game", CASES, ids=name_of)
def test_three_calls_are_one_call_at_three_positions(game: dict[str, Any]) -> None:
    models = []
    for at_once in (True, False):
        torch.manual_seed(0)
        models.append(Positions(at_once))
    # the two nonlinear rollouts differ: one sees the first position alone move before the second runs
    steps = 1 if game["feedback"] == "nonlinear" else 3
    found = [run(model, steps, clamp=False, refresh_every=1, **game)[0] for model in models]
    if game["feedback"] == "nonlinear":
        found = [f[:2] for f in found]  # the shared layer acts first, on the same state
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_a_recurrent_cell(game: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Unrolled(3)
    _, opt = run(model, **game)
    assert [layer.name for layer in opt.diagnostics.layers] == ["first", "cell", "head"]
    assert f"{B}" not in "".join(layer.name for layer in opt.diagnostics.layers)


@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_the_number_of_calls_may_change(game: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Unrolled(1).double()
    opt = OCNOpt(model.parameters(), 0.05, model=model, refresh_every=1, **game)
    losses = []
    for i in range(16):
        model.times = 1 + i % 2
        losses += train(model, opt, batches(1))
    assert min(losses[-2:]) < losses[0]


def test_a_module_with_two_names_is_one_module() -> None:
    runs = []
    for twice in (False, True):
        torch.manual_seed(0)
        model = Unrolled(2)
        if twice:
            model.alias = model.cell
        runs.append(run(model, rank=3, feedback="nonlinear")[0])
    assert_identical(*runs)


@pytest.mark.parametrize("game", [g for g in SOME_GAMES if g != SOME_GAMES[0]], ids=name_of)
def test_it_acts_at_its_first_use(game: dict[str, Any]) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.between, self.cell = nn.Linear(5, CLASSES), nn.Linear(5, 5), nn.Linear(FEATURES, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.cell(torch.tanh(self.between(torch.tanh(self.cell(x)))))))

    torch.manual_seed(0)
    _, opt = run(Again(), **game)
    assert [layer.name for layer in opt.diagnostics.layers] == ["cell", "between", "head"]

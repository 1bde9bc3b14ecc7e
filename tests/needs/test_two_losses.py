"""Two losses, two heads, two backward passes before one step: the step is that of their sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import CLASSES, FEATURES, SOME_GAMES, assert_identical, batches, name_of, state_of, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt

games = pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.inner = nn.Linear(FEATURES, 6), nn.Linear(6, 6)
        self.classes, self.size = nn.Linear(6, CLASSES), nn.Linear(6, 1)
        self.double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(self.inner(torch.tanh(self.body(x))))
        return self.classes(z), self.size(z)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits, size = model(x)
    return cross_entropy(logits, y), 0.3 * (size.squeeze(1) - x.norm(dim=1)).square().mean()


def run(game: dict[str, Any], how: str) -> tuple[list[Tensor], list[dict[str, Any]]]:
    model = TwoHeads()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    for x, y in batches(3):
        opt.zero_grad()
        first, second = losses(model, x, y)
        if how == "sum":
            (first + second).backward()
        elif how == "one after the other":
            first.backward(retain_graph=True)
            second.backward()
        elif how == "the other way round":
            second.backward(retain_graph=True)
            first.backward()
        else:
            torch.autograd.backward([first, second])
        opt.step()
    return values(model), state_of(opt)


@pytest.mark.parametrize("how", ["one after the other", "the other way round", "torch.autograd.backward"])
@games
def test_two_backwards_are_one(game: dict[str, Any], how: str) -> None:
    torch.testing.assert_close(run(game, how), run(game, "sum"), rtol=1e-7, atol=1e-10)


@games
def test_two_calls_one_loss_each(game: dict[str, Any]) -> None:
    """A regulariser on other inputs, say: all the samples that went through the network are one batch."""
    together, apart = TwoHeads(), TwoHeads()
    (x, y), (x2, y2) = batches(2)
    opt = OCNOpt(together.parameters(), 0.05, model=together, **game)
    other = OCNOpt(apart.parameters(), 0.05, model=apart, **game)
    for _ in range(2):
        opt.zero_grad()
        logits, _ = together(torch.cat([x, x2]))
        (cross_entropy(logits, torch.cat([y, y2]), reduction="sum") / 12).backward()
        opt.step()
        other.zero_grad()
        for xs, ys in ((x, y), (x2, y2)):
            (cross_entropy(apart(xs)[0], ys, reduction="sum") / 12).backward()
        other.step()
    torch.testing.assert_close(values(together), values(apart), rtol=1e-7, atol=1e-10)


@games
def test_a_head_without_a_loss_stands_still(game: dict[str, Any]) -> None:
    model = TwoHeads()
    opt = OCNOpt(model.parameters(), 0.05, model=model, weight_decay=0.1, **game)
    before = values(model.size)
    for x, y in batches(2):
        opt.zero_grad()
        losses(model, x, y)[0].backward()
        opt.step()
    assert_identical(values(model.size), before)

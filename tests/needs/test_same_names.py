"""Two parts of a model, given by names that are the same: a name is for people, who is who is told by the tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import pytest
import torch
from tests.toys import CLASSES, FEATURES, assert_identical, batches, name_of, state_of, train, values
from torch import nn

from ocnopt import OCNOpt

GAMES: list[dict[str, Any]] = [
    {},
    {"bellman": "paper"},
    {"rank": 3},
    {"feedback": "nonlinear", "rank": "full"},
]


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Any) -> Any:
        return self.out(self.head(self.body(x)))


def run(params: Callable[[Parent], Iterable[Any]], game: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    torch.manual_seed(0)
    model = Parent().double()
    model.out.requires_grad_(False)
    opt = OCNOpt(params(model), 0.05, model=model, curvature="kronecker", **game)
    train(model, opt, batches(3))
    return values(model), state_of(opt)


def by_name(model: Parent) -> Iterable[Any]:
    return chain(model.body.named_parameters(), model.head.named_parameters())


def plain(model: Parent) -> Iterable[Any]:
    return chain(model.body.parameters(), model.head.parameters())


@pytest.mark.parametrize("game", GAMES, ids=name_of)
def test_each_has_factors_of_its_own(game: dict[str, Any]) -> None:
    found, expected = run(by_name, game), run(plain, game)
    factors = [s["input_factor"] for s in found[1] if "input_factor" in s]
    assert len(factors) == 2
    assert not torch.equal(*factors)
    assert_identical(found, expected)


def test_they_are_really_called_the_same() -> None:
    assert [n for n, _ in by_name(Parent())] == ["0.weight", "0.bias"] * 2

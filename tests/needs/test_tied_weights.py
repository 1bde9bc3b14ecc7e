"""One parameter in two modules is one player, at its first use, with the gradients of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import GAMES, SOME_GAMES, B, backward, name_of, train, values
from torch import Tensor, nn
from torch.nn import functional as F

from ocnopt import OCNOpt
from ocnopt.groups import Groups

WORDS, WIDTH, T = 7, 4, 3


class Language(nn.Module):
    """Embedding and output layer share one matrix: by two modules, or by hand."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        if how == "modules":
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            self.head.weight = self.embed.weight
        self.aux = nn.Linear(WIDTH, WORDS, bias=False)
        self.aux.weight = self.embed.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.body(self.embed(tokens))).mean(1)
        return self.head(x) if self.how == "modules" else F.linear(x, self.embed.weight)


def data(n: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(4)
    return [(torch.randint(WORDS, (B, T), generator=g), torch.randint(WORDS, (B,), generator=g)) for _ in range(n)]


def run(how: str, **options: Any) -> tuple[list[Tensor], OCNOpt]:
    model = Language(how)
    opt = OCNOpt(model.parameters(), 0.05, model=model, **options)
    train(model, opt, data(3))
    return values(model), opt


@pytest.mark.parametrize("game", [g for g in GAMES if g["curvature"] != "kronecker"], ids=name_of)
def test_trains_without_a_word(game: dict[str, Any]) -> None:
    """Both uses are read, the third module that holds the parameter is not called at all, and nothing falls back."""
    _, opt = run("modules", **game)
    assert [layer.name for layer in opt.diagnostics.layers] == ["embed", "body"]
    assert "p.grad" not in opt.summary()


@pytest.mark.parametrize("game", [g for g in SOME_GAMES if g["curvature"] == "kronecker"], ids=name_of)
def test_there_is_no_kronecker_block_for_two_layers(game: dict[str, Any]) -> None:
    _, opt = run("modules", **game)
    assert "shared by several modules: adaptive curvature" in opt.summary()


@pytest.mark.parametrize("rank", [1, 3, "full"])
def test_groups_add_up_over_the_uses(rank: Any) -> None:
    """The kernel of the tied matrix is that of the gradients of its groups, by autograd."""
    model = Language("modules")
    opt = OCNOpt(model.parameters(), 1.0, model=model, rank=rank, curvature="identity", momentum=0.0)
    (tokens, targets) = data(1)[0]
    groups = Groups(B, B if rank == "full" else rank)
    columns = []
    for g in range(groups.rank):
        rows = groups.of_rows() == g
        loss = F.cross_entropy(model(tokens)[rows], targets[rows], reduction="sum") / B
        columns.append(torch.autograd.grad(loss, model.embed.weight)[0].flatten())
    G = torch.stack(columns)
    backward(model, tokens, targets)
    opt.step()
    assert opt.diagnostics.kernels is not None
    torch.testing.assert_close(opt.diagnostics.kernels.K[0], G @ G.T, rtol=1e-9, atol=1e-12)


def test_a_use_by_hand_is_spread_over_the_groups() -> None:
    """Without a module there is no call to read; the step still has the whole gradient in it."""
    runs = []
    for how in ("modules", "by hand"):
        runs.append(run(how, rank=3, gauss_newton=1e-6)[0])  # no feedback to speak of: w = 1
    torch.testing.assert_close(*runs, rtol=1e-6, atol=1e-8)

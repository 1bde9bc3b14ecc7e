"""A mean over tokens with padding: what the padding sees has no adjoint, so it has no say, however much there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import FEEDBACKS, SOME_GAMES, assert_identical, name_of, state_of, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt

VOCABULARY, PAD = 7, 0
games = pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.norm, self.inner, self.head = nn.LayerNorm(5), nn.Linear(5, 6), nn.Linear(6, VOCABULARY)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.norm(self.embed(tokens)))))


def sentences(width: int) -> Tensor:
    """Five sentences of one to five words; the padding is none of the words."""
    tokens = torch.randint(1, VOCABULARY, (5, 5), generator=torch.Generator().manual_seed(2))
    tokens = torch.where(torch.arange(5) <= torch.arange(5)[:, None], tokens, PAD)
    return torch.cat([tokens, tokens.new_full((5, width - 5), PAD)], 1)


def run(game: dict[str, Any], width: int, how: str, lr: float = 0.05) -> tuple[Any, ...]:
    model, tokens = Tagger(), sentences(width)
    opt = OCNOpt(model.parameters(), lr, model=model, **game)
    for _ in range(3):
        opt.zero_grad()
        logits, targets = model(tokens), torch.where(tokens == PAD, PAD, VOCABULARY - tokens)
        if how == "ignore_index":
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD)
        else:
            each = cross_entropy(logits.transpose(1, 2), targets, reduction="none")
            loss = (each * (targets != PAD)).sum() / (targets != PAD).sum()
        loss.backward()
        opt.step()
    return values(model), state_of(opt), opt.diagnostics.w


@games
def test_two_ways_to_write_the_mean(game: dict[str, Any]) -> None:
    torch.testing.assert_close(run(game, 6, "ignore_index"), run(game, 6, "by hand"), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("game", [g for g in SOME_GAMES if g["curvature"] != "kronecker"], ids=name_of)
def test_more_padding_changes_nothing(game: dict[str, Any]) -> None:
    torch.testing.assert_close(run(game, 5, "ignore_index"), run(game, 9, "ignore_index"), rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_kronecker_factors_see_inputs_of_padding_but_no_adjoints(feedback: str) -> None:
    """Inputs are averaged over all positions of a sample, so padding is in A; and C is a mean over positions too."""
    game = {"curvature": "kronecker", "feedback": feedback}
    (_, few, _), (_, many, _) = (run(game, width, "ignore_index", lr=0.0) for width in (5, 9))
    outputs = [[s["output_factor"] for s in each if "output_factor" in s] for each in (few, many)]
    assert len(outputs[0]) == 2
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(5 * ours, 9 * theirs)


@games
def test_a_batch_of_padding_alone_moves_nothing(game: dict[str, Any]) -> None:
    """Its mean is 0/0, but no gradient is: nothing to learn, and nothing moves."""
    model = Tagger()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    before = values(model)
    tokens = torch.full((3, 4), PAD)
    loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), ignore_index=PAD)
    assert loss.isnan()
    loss.backward()
    opt.step()
    assert_identical(values(model), before)

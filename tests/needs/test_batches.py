"""Batches of every size: none, one, the short last one, fewer samples than groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import (
    CLASSES,
    GAMES,
    SOME_GAMES,
    assert_identical,
    batches,
    mlp,
    name_of,
    state_of,
    train,
    values,
)
from torch import nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt

games = pytest.mark.parametrize("game", GAMES, ids=name_of)


@games
@pytest.mark.parametrize("first", [True, False])
def test_an_empty_batch_changes_nothing(game: dict[str, Any], first: bool) -> None:
    """Its sum of losses is zero and so are its gradients; there is nothing to learn a statistic from."""
    runs = []
    for empty in (False, True):
        model = mlp()
        opt = OCNOpt(model.parameters(), 0.1, model=model, momentum=0.0, **game)
        if not first:
            train(model, opt, batches(2))
        if empty:
            x, y = batches(size=0)[0]
            opt.zero_grad()
            cross_entropy(model(x), y, reduction="sum").backward()
            before = values(model)
            opt.step()
            assert_identical(values(model), before)
        train(model, opt, batches(2, seed=2))
        runs.append((values(model), state_of(opt)))
    assert all(t.isfinite().all() for t in runs[1][0])
    if game["curvature"] == "identity":
        assert_identical(runs[1][0], runs[0][0])
    if game["curvature"] == "kronecker":
        factors = [[s["input_factor"] for s in state if "input_factor" in s] for _, state in runs]
        assert_identical(*factors)


@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_the_mean_over_an_empty_batch_is_skipped(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, **game)
    before = values(model)
    train(model, opt, batches(size=0))
    assert_identical(values(model), before)


@games
def test_one_sample(game: dict[str, Any]) -> None:
    """One sample is one group, whatever the rank."""
    runs = []
    for rank in (game["rank"], 1):
        model = mlp()
        opt = OCNOpt(model.parameters(), 0.1, model=model, **{**game, "rank": rank})
        train(model, opt, batches(3, size=1))
        runs.append(values(model))
    torch.testing.assert_close(*runs, rtol=1e-7, atol=1e-9)


@games
def test_the_last_batch_may_be_short(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    losses = []
    for epoch in range(4):
        losses += train(model, opt, [*batches(2, seed=1), *batches(1, size=2, seed=2), *batches(1, size=1, seed=3)])
        assert all(t.isfinite().all() for t in values(model)), epoch
    assert sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.parametrize("game", [g for g in GAMES if g["rank"] == "full"], ids=name_of)
@pytest.mark.parametrize("rank", [6, 7, 100])
def test_more_groups_than_samples_is_one_each(game: dict[str, Any], rank: int) -> None:
    runs = []
    for r in (rank, "full"):
        model = mlp()
        opt = OCNOpt(model.parameters(), 0.1, model=model, **{**game, "rank": r})
        train(model, opt, batches(2))
        runs.append(values(model))
    assert_identical(*runs)


@pytest.mark.parametrize("game", [g for g in GAMES if g["rank"] == 3 and g["curvature"] == "adaptive"], ids=name_of)
def test_groups_are_contiguous_and_follow_the_samples(game: dict[str, Any]) -> None:
    """The order of samples within a group is of no importance; between groups it is."""
    (x, y), found = batches(size=6)[0], []
    for order in ([0, 1, 2, 3, 4, 5], [1, 0, 3, 2, 5, 4], [0, 3, 1, 4, 2, 5]):
        model = mlp()
        opt = OCNOpt(model.parameters(), 0.3, model=model, clamp=False, **game)
        train(model, opt, [(x[order], y[order])])
        found.append(values(model)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-9)
    assert not torch.allclose(found[0], found[2], rtol=1e-5)


def test_an_image_batch_of_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, CLASSES)).double()
    for game in SOME_GAMES:
        opt = OCNOpt(model.parameters(), model=model, **game)
        model(torch.randn(0, 1, 4, 4, dtype=torch.float64)).sum().backward()
        before = values(model)
        opt.step()
        assert_identical(values(model), before)
        opt.detach()

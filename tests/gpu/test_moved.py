"""A checkpoint of one kind of device goes on on another."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from tests.toys import SOME_GAMES, batches, mlp, name_of, state_of, train, values
from torch import Tensor, nn

from ocnopt import OCNOpt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make(device: str, game: dict[str, Any]) -> tuple[nn.Module, OCNOpt]:
    model = mlp().to(device)
    return model, OCNOpt(model.parameters(), 0.05, model=model, refresh_every=2, damping=0.1, **game)


def data(device: str, seed: int) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(device), y.to(device)) for x, y in batches(3, seed=seed)]


@pytest.mark.parametrize(("old", "new"), [("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.parametrize("mapped", [True, False], ids=["map_location", "as saved"])
@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_goes_on_elsewhere(game: dict[str, Any], mapped: bool, old: str, new: str) -> None:
    model, opt = make(old, game)
    train(model, opt, data(old, 1))
    file = io.BytesIO()
    torch.save((model.state_dict(), opt.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True, map_location=new if mapped else None)
    there, its = make(new, game)
    there.load_state_dict(weights)
    its.load_state_dict(state)
    for own in state_of(its):
        assert {v.device.type for v in own.values() if isinstance(v, Tensor)} == {new}
    losses = train(model, opt, data(old, 8)), train(there, its, data(new, 8))
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-9)
    ours, theirs = ([t.cpu() for t in values(m)] for m in (there, model))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)

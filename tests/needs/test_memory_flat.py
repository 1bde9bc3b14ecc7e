"""Two hundred steps, in every way of playing: not a tensor and not a byte more than after the first few."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.toys import CURVATURES, FEEDBACKS, RANKS, backward, batches, mlp
from torch import Tensor

from ocnopt import OCNOpt

GAMES: dict[str, dict[str, Any]] = {
    **{
        f"{c}-{f}-{r}": {"curvature": c, "feedback": f, "rank": r}
        for c in CURVATURES
        for f in FEEDBACKS
        for r in RANKS
        if r != "full" or c == "identity"
    },
    "paper": {"bellman": "paper"},
    "noncooperative": {"game": "noncooperative", "feedback": "nonlinear"},
    "off": {"feedback": "off", "curvature": "kronecker"},
}


@pytest.fixture(autouse=True)
def without_garbage_collection() -> Iterator[None]:
    """What only the collector could find would be there until it comes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held() -> tuple[int, int]:
    """How many tensors are alive, and how many bytes they hold together."""
    fake = "FakeTensor"  # has no memory; a compiler that ran before may hold some
    found = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and type(o).__name__ != fake]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found if not t.is_meta}
    return len(found), sum(memory.values())


@pytest.mark.parametrize("name", GAMES)
def test_two_hundred_steps(name: str) -> None:
    model, (x, y) = mlp(depth=2, dtype=torch.float32), batches(dtype=torch.float32)[0]
    opt = OCNOpt(model.parameters(), 1e-3, model=model, refresh_every=20, **GAMES[name])
    found = []
    for step in range(200):
        if step % 7 == 3:
            model(x)  # thrown away
        if step % 11 == 5:
            backward(model, x, y)  # and so is this batch
            model.zero_grad()
        opt.zero_grad()
        backward(model, x, y)
        opt.step()
        if step % 50 == 20:
            opt.zero_grad()
            found.append(held())
    assert found[1:] == found[:-1]
    tape = opt.memory_usage().get("tape", 0)
    assert tape == 0

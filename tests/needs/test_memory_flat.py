"""Two hundred steps, in every way of playing: not a tensor and not a byte more than after the first few.

In a chain and in a network with branches; of one pass each, and of several.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.toys import CLASSES, CURVATURES, FEATURES, FEEDBACKS, RANKS, backward, batches, mlp
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

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


class Residual(nn.Module):
    """A branch that is added to the stream, and layers before and after it. Its layers tell where they write."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch, self.head = (nn.Linear(n, m) for n, m in ((FEATURES, 4), (4, 4), (4, CLASSES)))
        self.written: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + torch.tanh(self.branch(x)).mul(0.5)
        self.written.append(StorageWeakRef(x.untyped_storage()))
        out: Tensor = self.head(x)
        self.written.append(StorageWeakRef(out.untyped_storage()))
        return out


def held_over_time(model: nn.Module, opt: OCNOpt, passes: int = 1) -> list[tuple[int, int]]:
    """What was alive every now and then in two hundred steps, with passes and batches thrown away between them."""
    (x, y), found = batches(dtype=torch.float32)[0], []
    for step in range(200):
        if step % 7 == 3:
            model(x)  # thrown away
        if step % 11 == 5:
            backward(model, x, y)  # and so is this batch
            model.zero_grad()
        opt.zero_grad()
        for _ in range(passes):
            backward(model, x, y)
        opt.step()
        if step % 50 == 20:
            opt.zero_grad()
            found.append(held())
    return found


@pytest.mark.parametrize("name", GAMES)
def test_two_hundred_steps(name: str) -> None:
    model = mlp(depth=2, dtype=torch.float32)
    opt = OCNOpt(model.parameters(), 1e-3, model=model, refresh_every=20, **GAMES[name])
    found = held_over_time(model, opt)
    assert found[1:] == found[:-1]
    tape = opt.memory_usage().get("tape", 0)
    assert tape == 0


#: steps of several passes: where nothing is kept, where everything is, where sums are, and where the model runs again
SEVERAL: dict[str, dict[str, Any]] = {
    "linear-1": {"rank": 1},
    "linear-3": {"rank": 3},
    "linear-3-said": {"rank": 3, "accumulate": 2},
    "kronecker-3-said": {"rank": 3, "curvature": "kronecker", "accumulate": 2},
    "paper": {"bellman": "paper"},
    "nonlinear-1": {"feedback": "nonlinear"},
    "nonlinear-3": {"feedback": "nonlinear", "rank": 3},
    "nonlinear-3-said": {"feedback": "nonlinear", "rank": 3, "accumulate": 2},
}


@pytest.mark.parametrize("name", ["linear-1", "linear-3", "linear-3-said", "nonlinear-1", "nonlinear-3-said"])
def test_two_hundred_steps_of_two_passes(name: str) -> None:
    model = mlp(depth=2, dtype=torch.float32)
    opt = OCNOpt(model.parameters(), 1e-3, model=model, refresh_every=20, **SEVERAL[name])
    found = held_over_time(model, opt, passes=2)
    assert found[1:] == found[:-1]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", ["linear-3", "paper", "nonlinear-1"])
def test_two_hundred_steps_of_a_network_with_branches(name: str, passes: int) -> None:
    model = Residual()
    opt = OCNOpt(model.parameters(), 1e-3, model=model, **SEVERAL[name] | {"accumulate": passes})
    model.written.clear()
    found = held_over_time(model, opt, passes)
    assert found[1:] == found[:-1]
    assert all(memory.expired() for memory in model.written)


@pytest.mark.parametrize("end", ["step", "zero_grad"])
@pytest.mark.parametrize("name", SEVERAL)
def test_what_the_layers_saw_in_several_passes_is_let_go(name: str, end: str) -> None:
    model = Residual()
    opt = OCNOpt(model.parameters(), 1e-3, model=model, **SEVERAL[name])
    for _ in range(2):  # the first time the hooks learn what they need not keep
        opt.zero_grad()
        model.written.clear()
        for x, y in batches(2, dtype=torch.float32):
            model.written.append(StorageWeakRef(x.untyped_storage()))
            backward(model, x, y)
        del x
        getattr(opt, end)()
        assert len(model.written) >= 6
        assert all(memory.expired() for memory in model.written)


def test_of_passes_that_are_summed_up_nothing_else_is_left() -> None:
    """Before the step: as soon as the next pass begins, where their number was said."""
    model, data = Residual(), batches(2, dtype=torch.float32)
    opt = OCNOpt(model.parameters(), 1e-3, model=model, rank=3, accumulate=2)
    first = [data.pop(0)]
    memory = StorageWeakRef(first[0][0].untyped_storage())
    backward(model, *first[0])
    first.clear()
    assert not memory.expired()
    model(data[0][0])
    assert opt.memory_usage()["tape"]  # the sums
    assert memory.expired()
    assert all(memory.expired() for memory in model.written[:2])

"""An exception at any moment leaves optimizer and model as they were, and the next step as if it had not been."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import (
    CLASSES,
    FEATURES,
    SOME_GAMES,
    assert_identical,
    backward,
    batches,
    hooks_on,
    name_of,
    state_of,
    train,
    values,
)
from torch import Tensor, nn

from ocnopt import OCNOpt, stock

games = pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)


class Trap(nn.Module):
    """Raises at a given call."""

    def __init__(self) -> None:
        super().__init__()
        self.fuse = 0
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.fuse -= 1
        if self.fuse == 0:
            raise InterruptedError("trap")
        return x


def trapped() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), Trap(), nn.Dropout(0.2), nn.Linear(8, CLASSES)
    ).double()  # fmt: skip


@pytest.fixture(autouse=True, params=[1, stock._FEW], ids=["kept", "new"])
def memory_of_copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the stock, as copies of large tensors have it on a CPU; or torch's."""
    monkeypatch.setattr(stock, "_FEW", request.param)


def start(game: dict[str, Any], refresh_every: int = 2) -> tuple[nn.Sequential, OCNOpt]:
    model = trapped()
    return model, OCNOpt(model.parameters(), 0.05, model=model, refresh_every=refresh_every, **game)


@games
@pytest.mark.parametrize("when", ["in forward", "after forward", "in backward", "after backward"])
@pytest.mark.parametrize("cleared_by", ["opt", "model", "hand"])
def test_between_forward_and_step(game: dict[str, Any], when: str, cleared_by: str) -> None:
    runs = []
    for happens in (False, True):
        model, opt = start(game)
        train(model, opt, batches(2))
        if happens:
            before = values(model)
            with pytest.raises(InterruptedError):
                fail(model, when)
            for t, value in zip((*model.parameters(), *model.buffers()), before, strict=True):
                t.data.copy_(value)  # the forward pass itself has changed the statistics
        if cleared_by == "opt":
            opt.zero_grad()
        elif cleared_by == "model":
            model.zero_grad()
        else:
            for p in model.parameters():
                p.grad = None
        torch.manual_seed(8)
        for x, y in batches(2, seed=3):  # no zero_grad before the first forward pass
            backward(model, x, y)
            opt.step()
            opt.zero_grad()
        runs.append((values(model), state_of(opt)))
    assert_identical(*runs)


def fail(model: nn.Sequential, when: str) -> None:
    x, y = batches(size=4, seed=50)[0]
    model[3].fuse = 1 if when == "in forward" else 0
    out = model(x)
    if when == "in backward":
        out.register_hook(lambda g: explode())
    if when == "after forward":
        explode()
    nn.functional.cross_entropy(out, y).backward()
    if when == "after backward":
        explode()


def explode() -> None:
    raise InterruptedError


@pytest.mark.parametrize("game", [g for g in SOME_GAMES if g["feedback"] == "nonlinear"], ids=name_of)
@pytest.mark.parametrize("first", [True, False])
def test_inside_the_second_forward_pass(game: dict[str, Any], first: bool) -> None:
    """Half of the layers have been updated by then; all of them are put back, with their state."""
    model, opt = start(game)
    hooks = hooks_on(model)
    if not first:
        train(model, opt, batches(3))
    torch.manual_seed(2)
    backward(model, *batches(seed=3)[0])
    before, state, rng = values(model), state_of(opt), torch.get_rng_state()
    # the probe (rank > 1, first step) runs before the second pass
    model[3].fuse = 4 if first and game["rank"] != 1 else 1
    with pytest.raises(InterruptedError):
        opt.step()
    assert_identical(values(model), before)
    assert_identical(state_of(opt), state)
    assert_identical(torch.get_rng_state(), rng)
    assert hooks_on(model) == hooks
    assert all(m.training for m in model.modules())
    # and then it goes on as if nothing had been
    twin, opt2 = start(game)
    if not first:
        train(twin, opt2, batches(3))
    twin.load_state_dict(model.state_dict())
    for net, optimizer in ((model, opt), (twin, opt2)):
        torch.manual_seed(9)
        train(net, optimizer, batches(2, seed=6))
    assert_identical(values(model), values(twin))


@pytest.mark.parametrize("every", [1, 3, 12])
@pytest.mark.parametrize("ekfac", [True, False])
def test_bases_in_every_step(every: int, ekfac: bool) -> None:
    """Where they are renewed, begun, fetched, and where nothing is done to them."""
    model, opt = start({"curvature": "kronecker", "feedback": "nonlinear", "ekfac": ekfac}, every)
    train(model, opt, batches(1))
    for i, batch in enumerate(batches(15)):
        backward(model, *batch)
        before, state = values(model), state_of(opt)
        model[3].fuse = 1
        with pytest.raises(InterruptedError):
            opt.step()
        assert_identical(state_of(opt), state)
        assert_identical(values(model), before)
        train(model, opt, batches(1, seed=i))


@pytest.mark.parametrize(
    "game", [g for g in SOME_GAMES if g["rank"] != 1 or g["curvature"] == "kronecker"], ids=name_of
)
def test_inside_the_probe(game: dict[str, Any]) -> None:
    model, opt = start(game)
    backward(model, *batches()[0])
    before, rng = values(model), torch.get_rng_state()
    model[3].fuse = 2
    with pytest.warns(UserWarning, match="samples") as said:  # what the probe cannot see is not relied on
        opt.step()
    assert "InterruptedError: trap" in str(said[0].message)
    assert "does not run over the samples" in str(said[1].message)
    assert any(not torch.equal(p, q) for p, q in zip(values(model), before, strict=True))
    assert_identical(torch.get_rng_state(), rng)
    assert all(m.training for m in model.modules())
    train(model, opt, batches(2))


@games
def test_inside_the_closure(game: dict[str, Any]) -> None:
    model, opt = start(game)
    before = values(model)
    with pytest.raises(InterruptedError):
        opt.step(explode)
    assert_identical(values(model), before)
    train(model, opt, batches(1))


def test_a_part_called_after_a_failed_forward_pass_does_not_belong_to_it() -> None:
    model, opt = start({"feedback": "nonlinear"})
    with pytest.raises(InterruptedError):
        fail(model, "in forward")
    nn.functional.cross_entropy(model[-1](torch.ones(4, 8, dtype=torch.float64)), batches(size=4)[0][1]).backward()
    with pytest.raises(RuntimeError, match="forward and backward pass of the attached model itself"):
        opt.step()


def test_what_was_put_back_is_nobody_elses_memory() -> None:
    """The copies of a failed step are the state from then on: those of the next one are others, or a second failure
    would put back what it has spoilt.
    """
    model, opt = start({"feedback": "nonlinear", "curvature": "adaptive", "rank": 1})
    train(model, opt, batches(2))
    for seed in (3, 4):
        backward(model, *batches(seed=seed)[0])
        before, state = values(model), state_of(opt)
        model[3].fuse = 1
        with pytest.raises(InterruptedError):
            opt.step()
        assert_identical(values(model), before)
        assert_identical(state_of(opt), state)
        opt.zero_grad()

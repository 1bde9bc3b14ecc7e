"""Gradients that are finite but whose squares are not: the step is skipped like one with NaN, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import CURVATURES, SOME_GAMES, assert_identical, batches, mlp, name_of, state_of, train, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt

ALL = [*SOME_GAMES, *({"curvature": c, "feedback": "off"} for c in CURVATURES)]
games = pytest.mark.parametrize("game", ALL, ids=name_of)


def huge(model: nn.Module, opt: OCNOpt, x: Tensor, y: Tensor, size: float) -> None:
    """A step from gradients whose largest entry is ``size``."""
    opt.zero_grad()
    output = model(x)
    loss = cross_entropy(output, y)
    largest = max(g.abs().max() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
    opt.zero_grad()
    (loss * (size / largest)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    opt.step()


def remembered(opt: OCNOpt) -> list[dict[str, Any]]:
    """How long ago a basis was made may be counted on the host, without asking the device whether a step counted."""
    return [{k: v for k, v in s.items() if k != "since_refresh"} for s in state_of(opt)]


@games
@pytest.mark.parametrize("size", [1e18, 1e25])
def test_as_if_it_had_not_been(game: dict[str, Any], size: float) -> None:
    runs = []
    for spoiled in (True, False):
        model, data = mlp(dtype=torch.float32), batches(4, dtype=torch.float32)
        opt = OCNOpt(model.parameters(), 0.05, model=model, refresh_every=2, **game)
        train(model, opt, data[:2])
        if spoiled:
            before = values(model)
            huge(model, opt, *data[0], size)
            assert_identical(values(model), before)
            for state in state_of(opt):
                assert all(v.isfinite().all() for v in state.values() if isinstance(v, Tensor))
            with pytest.warns(UserWarning, match=r"1 step\(s\) skipped: the gradient of '.*too large to be squared"):
                assert opt.diagnostics.skipped_steps == 1
        train(model, opt, data[2:])
        runs.append((values(model), remembered(opt)))
    assert_identical(*runs)


@games
def test_double_precision_has_room_for_them(game: dict[str, Any]) -> None:
    model, data = mlp(), batches(3)
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    train(model, opt, data[:1])
    before, clock = values(model), state_of(opt)[0]["step"]
    huge(model, opt, *data[1], 1e25)
    assert opt.diagnostics.skipped_steps == 0
    assert state_of(opt)[0]["step"] == clock + 1
    assert all(t.isfinite().all() for t in values(model))
    if game == {"curvature": "adaptive", "feedback": "off"}:  # elsewhere so steep a slope is a reason not to move
        assert all(not torch.equal(a, b) for a, b in zip(values(model), before, strict=True))
    for state in state_of(opt):
        assert all(v.isfinite().all() for v in state.values() if isinstance(v, Tensor))


@pytest.mark.parametrize("curvature", CURVATURES)
def test_each_parameter_is_measured_by_its_own_precision(curvature: str) -> None:
    """A layer in double precision does not make room in the layers that have single precision."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = mlp(dtype=torch.float32), nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x).double())

    torch.manual_seed(0)
    model, data = Mixed(), batches(2, dtype=torch.float32)
    opt = OCNOpt(model.parameters(), 0.05, model=model, curvature=curvature)
    train(model, opt, data[:1])
    before, state = values(model), remembered(opt)
    huge(model, opt, *data[1], 1e25)
    assert_identical(values(model), before)
    assert_identical(remembered(opt), state)
    with pytest.warns(UserWarning, match=r"1 step\(s\) skipped"):
        assert opt.diagnostics.skipped_steps == 1


@pytest.mark.parametrize("game", [g for g in ALL if g["curvature"] == "kronecker"], ids=name_of)
def test_clipping_p_grad_does_not_clip_the_samples(game: dict[str, Any]) -> None:
    """The Kronecker factors are squares of adjoints, which nobody has clipped."""
    model, data = mlp(dtype=torch.float32), batches(2, dtype=torch.float32)
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    train(model, opt, data[:1])
    opt.zero_grad()
    (1e25 * cross_entropy(model(data[0][0]), data[0][1])).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    opt.step()
    train(model, opt, data[1:])
    assert all(t.isfinite().all() for t in values(model))
    for state in state_of(opt):
        assert all(v.isfinite().all() for v in state.values() if isinstance(v, Tensor))

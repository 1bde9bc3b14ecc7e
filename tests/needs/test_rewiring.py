"""The same calls in the same order, but wired otherwise from some step on: the measured state is that of the wiring.

In a chain the input of a layer is the whole state; elsewhere changes are added up from what the layers wrote, which is
kept from the step after the first that was not a chain. In that one step predictions stand in for measurements.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import CLASSES, FEATURES, assert_identical, batches, name_of, state_of, train, values
from torch import Tensor, nn

from ocnopt import OCNOpt
from ocnopt.anatomy import Anatomy

GAMES: list[dict[str, Any]] = [
    {"curvature": "identity", "rank": 1, "lr": 0.5},
    {"curvature": "adaptive", "rank": 3, "lr": 0.02},
    {"curvature": "identity", "rank": 1, "lr": 0.5, "bellman": "paper"},
    {"curvature": "kronecker", "rank": 1, "lr": 0.5, "damping": 1.0},
]
games = pytest.mark.parametrize("game", GAMES, ids=name_of)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.residual = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        y = torch.tanh(self.inner(x))
        return self.head(x + y if self.residual else y)


def make(game: dict[str, Any]) -> tuple[Net, OCNOpt]:
    torch.manual_seed(0)
    model = Net().double()
    return model, OCNOpt(model.parameters(), model=model, feedback="nonlinear", clamp=False, momentum=0.0, **game)


def fresh(model: Net, opt: OCNOpt, game: dict[str, Any]) -> tuple[Net, OCNOpt]:
    """The same weights and state, but nothing seen yet."""
    twin, its = make(game)
    twin.load_state_dict(model.state_dict())
    twin.residual = model.residual
    its.load_state_dict(opt.state_dict())
    return twin, its


@games
def test_from_the_second_step_on_as_if_it_had_never_been_a_chain(game: dict[str, Any]) -> None:
    model, opt = make(game)
    data = batches(5)
    train(model, opt, data[:2])
    model.residual = True
    train(model, opt, data[2:3])
    twin, its = fresh(model, opt, game)
    for each in data[3:]:
        train(model, opt, [each])
        train(twin, its, [each])
        assert_identical(opt.diagnostics.measured_s, its.diagnostics.measured_s)
    assert_identical(values(model), values(twin))
    assert_identical(state_of(opt), state_of(its))


@games
def test_in_the_first_step_predictions_stand_in(game: dict[str, Any]) -> None:
    """Right to first order; the chain's form would miss the skip connection altogether."""
    s = []
    for seen_as_chain in (True, False):
        model, opt = make({**game, "lr": 0.0})
        if seen_as_chain:
            train(model, opt, batches(1))
        model.residual = True
        for group in opt.param_groups:
            group["lr"] = 1e-4
        opt.state.clear()
        train(model, opt, batches(1))
        s.append(opt.diagnostics.measured_s)
    torch.testing.assert_close(*s, rtol=1e-2, atol=1e-9)


@games
def test_a_chain_is_still_one_at_every_step(game: dict[str, Any]) -> None:
    """What a layer read is compared there, and differs at second order from what was added up."""
    model, opt = make(game)
    train(model, opt, batches(3))
    twin, its = fresh(model, opt, game)
    train(model, opt, batches(1))
    train(twin, its, batches(1))
    assert_identical(values(model), values(twin))


@games
def test_a_chain_again_after_another_wiring(game: dict[str, Any]) -> None:
    """It is not taken for a chain any more, but its live edges are those of one."""
    model, opt = make(game)
    train(model, opt, batches(1))
    model.residual = True
    train(model, opt, batches(1))
    model.residual = False
    twin, its = fresh(model, opt, game)
    train(model, opt, batches(1))
    train(twin, its, batches(1))
    assert_identical(opt.diagnostics.measured_s, its.diagnostics.measured_s)
    assert_identical(values(model), values(twin))


def _swap_buffers(model: nn.Sequential) -> None:
    own = model[1]._buffers
    own["size"], own["mean"] = own.pop("mean"), own.pop("size")


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[1].insert(0, model[0].pop(1)),  # the same modules in the same order
        lambda model: model[0].append(nn.Linear(2, 2)),
        lambda model: setattr(model[1][0], "weight", nn.Parameter(torch.ones(2, 2))),
        lambda model: model[1].register_buffer("size", torch.ones(3)),
        _swap_buffers,  # the same tensors under other names
    ],
)
def test_a_model_that_is_made_up_otherwise_is_looked_at_again(change: Any) -> None:
    model = nn.Sequential(nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.Linear(2, 2)))
    for name in ("mean", "size"):
        model[1].register_buffer(name, torch.zeros(3))
    known = Anatomy.of(model)
    assert Anatomy.of(model, known) is known
    change(model)
    assert Anatomy.of(model, known) is not known

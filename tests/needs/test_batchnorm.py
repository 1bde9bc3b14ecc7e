"""Buffers change once a step: the second forward pass starts where the first did and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import CLASSES, FEATURES, SOME_GAMES, assert_identical, backward, batches, name_of, values
from torch import Tensor, nn

from ocnopt import OCNOpt

games = pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)


class Drift(nn.Module):
    """Its buffers change in forward and feed into the output, in the three ways that people write it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("u", torch.full((8,), 0.1))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("lazy", None)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if self.how == "in place":
            self.u.mul_(0.5).add_(0.5 * mean)
            self.calls += 1
        elif self.how == "reassigned":
            self.u = 0.5 * self.u + 0.5 * mean
            self.calls = self.calls + 1
        else:
            self.lazy = mean if self.lazy is None else 0.5 * self.lazy + 0.5 * mean
            self.calls += 1
            return x * self.scale + self.lazy
        return x * self.scale + self.u


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None),
        nn.Linear(8, CLASSES),
    ).double()  # fmt: skip


@games
def test_statistics_are_updated_once(game: dict[str, Any]) -> None:
    model, plain = normed(), normed()
    opt = OCNOpt(model.parameters(), 0.0, model=model, **game)
    for x, y in batches(3):
        opt.zero_grad()
        backward(model, x, y)
        opt.step()
        plain(x)
    assert_identical(values(model), values(plain))
    assert model[1].num_batches_tracked == 3


@games
@pytest.mark.parametrize("how", ["in place", "reassigned", "lazy"])
@pytest.mark.filterwarnings("ignore:.*no adapter is registered for Drift")
def test_any_buffer_that_changes_in_forward(how: str, game: dict[str, Any]) -> None:
    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 8), Drift(how), nn.Tanh(), nn.Linear(8, CLASSES)).double()

    model, plain = net(), net()
    opt = OCNOpt(model.parameters(), 0.0, model=model, **game)
    for x, y in batches(3):
        opt.zero_grad()
        backward(model, x, y)
        opt.step()
        if game["feedback"] == "nonlinear":
            assert opt.diagnostics.predicted_change == 0.0, "a step of nothing: the same outputs, bit for bit"
        plain(x)
    assert_identical(values(model), values(plain))
    assert model[1].calls == 3


@games
def test_buffers_in_the_hands_of_others_stay_the_same_tensors(game: dict[str, Any]) -> None:
    model = normed()
    opt = OCNOpt(model.parameters(), model=model, **game)
    buffers = dict(model.named_buffers())
    backward(model, *batches()[0])
    opt.step()
    assert all(b is buffers[n] for n, b in model.named_buffers())


def test_spectral_norm_repeats_exactly() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 8)), nn.Tanh(), nn.Linear(8, CLASSES)
    ).double()
    opt = OCNOpt(model.parameters(), 0.0, model=model, feedback="nonlinear")
    for x, y in batches(3):
        opt.zero_grad()
        backward(model, x, y)
        before = values(model)
        opt.step()
        assert opt.diagnostics.predicted_change == 0.0
        assert_identical(values(model), before)


@games
def test_evaluation_mode_batchnorm_trains_too(game: dict[str, Any]) -> None:
    model = normed().eval()
    opt = OCNOpt(model.parameters(), 0.01, model=model, **game)
    losses = [step(model, opt, *batches()[0]) for _ in range(15)]
    assert losses[-1] < losses[0]
    assert model[1].num_batches_tracked == 0


def step(model: nn.Module, opt: OCNOpt, x: Tensor, y: Tensor) -> float:
    opt.zero_grad()
    loss = backward(model, x, y).item()
    opt.step()
    return loss


class Residual(nn.Module):
    """No chain: the second pass runs stage by stage, and batch norms without their averages."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.stem, self.first, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.second, self.by_name = nn.Linear(4, 2), by_name

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        y = self.first(x)
        return self.second(x + torch.tanh(self.norm(input=y) if self.by_name else self.norm(y)))


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("doubled", [False, True])
def test_a_norm_in_a_branch_runs_again_as_it_did(by_name: bool, doubled: bool) -> None:
    """Whatever runs: its own forward, or one that somebody has put in its place."""
    torch.manual_seed(0)
    model = Residual(by_name).double()
    if doubled:
        usual = model.norm.forward
        model.norm.forward = lambda input: 2 * usual(input)
    opt = OCNOpt(model.parameters(), lr=1e-9, model=model, feedback="nonlinear", curvature="identity")
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(8, 4, dtype=torch.float64)).square().mean().backward()
        before = {name: b.clone() for name, b in model.named_buffers()}
        opt.step()
        for name, b in model.named_buffers():
            assert torch.equal(b, before[name]), name
        assert opt.diagnostics.s is not None
        assert opt.diagnostics.s.abs().max() < 1e-6  # hardly anything has changed

"""Layers that forget their activations and compute them again in the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import CLASSES, FEATURES, GAMES, SOME_GAMES, assert_identical, batches, name_of, state_of, train, values
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ocnopt import OCNOpt


class Net(nn.Module):
    """Narrower than a batch is long: an eigenbasis of fewer samples is not unique, nor are steps in it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(FEATURES, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 4))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        forgets = {"use_reentrant": self.how == "reentrant"}
        x = self.block(x) if self.how == "kept" else checkpoint(self.block, x, **forgets)
        return self.head(torch.tanh(x))


def run(how: str, game: dict[str, Any]) -> tuple[list[Tensor], list[dict[str, Any]]]:
    torch.manual_seed(0)
    model = Net(how).double()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    torch.manual_seed(1)
    train(model, opt, batches(3))
    return values(model), state_of(opt)


@pytest.mark.parametrize("game", GAMES, ids=name_of)
def test_the_same_steps(game: dict[str, Any]) -> None:
    """Above rank 1 up to rounding: what is kept is split into groups in the backward pass, the rest in the step."""
    ours, theirs = run("computed again", game), run("kept", game)
    if game["rank"] == 1:
        assert_identical(ours, theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)


def test_the_old_kind_is_right_at_rank_one() -> None:
    assert_identical(run("reentrant", SOME_GAMES[0]), run("kept", SOME_GAMES[0]))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, in a pass without gradients
@pytest.mark.parametrize("game", SOME_GAMES[1:], ids=name_of)
def test_the_old_kind_hides_its_layers_and_that_is_said(game: dict[str, Any]) -> None:
    """Reentrant checkpoints run without gradients first; there is no call to read, and the layers fall back by name."""
    with pytest.warns(UserWarning, match=r"block\..*: its calls were not seen") as caught:
        run("reentrant", game)
    assert {str(w.message)[:7] for w in caught if "seen" in str(w.message)} == {"block.0", "block.3"}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, in a pass without gradients
@pytest.mark.parametrize("curvature", ["identity", "adaptive"])
def test_the_old_kind_trains_where_the_model_runs_again(curvature: str) -> None:
    """At rank 1 nobody reads the calls of the hidden layers, but they cannot act when their turn comes: also said."""
    torch.manual_seed(0)
    model = Net("reentrant").double()
    opt = OCNOpt(model.parameters(), 0.1, model=model, feedback="nonlinear", curvature=curvature)
    start, losses = values(model), train_and_listen(model, opt, 1)
    assert all(not torch.equal(a, b) for a, b in zip(values(model), start, strict=True))
    losses += train(model, opt, batches(1) * 30)  # it is said once
    assert losses[-1] < 0.8 * losses[0]


def train_and_listen(model: nn.Module, opt: OCNOpt, steps: int) -> list[float]:
    with pytest.warns(UserWarning, match="its calls were not seen") as caught:
        losses = train(model, opt, batches(1) * steps)
    hidden = {f"block.{i}.{p}" for i in (0, 3) for p in ("weight", "bias")}
    expected = {f"{n}: its calls were not seen; it acts before the network runs again" for n in hidden}
    assert {str(w.message) for w in caught if "None of the inputs" not in str(w.message)} == expected
    return losses

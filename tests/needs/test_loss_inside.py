"""A model that computes its own loss and returns it beside what it is made from, as those of ``transformers`` do."""

from __future__ import annotations

import pytest
import torch
from tests.toys import CLASSES, FEATURES, assert_identical, batches, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt


class Net(nn.Module):
    def __init__(self, residual: bool, inside: bool) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.first, self.second, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.residual, self.inside = residual, inside

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        z = torch.tanh(self.first(x))
        z = torch.tanh(self.second(z)) + (z if self.residual else 0.0)
        logits = self.head(z)
        return {"loss": cross_entropy(logits, y), "logits": logits} if self.inside else {"logits": logits}


@pytest.mark.parametrize("residual", [False, True], ids=["chain", "residual"])
def test_it_is_trained_as_with_the_loss_outside(residual: bool) -> None:
    """The loss counts once, and not again through the logits, which nobody reads outside."""
    trained = []
    for inside in (False, True):
        model = Net(residual, inside).double()
        opt = OCNOpt(model.parameters(), 0.05, model=model, feedback="nonlinear", clamp=False)
        for x, y in batches(3):
            opt.zero_grad()
            out = model(x, y)
            (out["loss"] if inside else cross_entropy(out["logits"], y)).backward()
            opt.step()
            assert opt.game.why_accumulated is None
        trained.append((values(model), opt.diagnostics.s))
    assert_identical(trained[1], trained[0])


def test_the_predicted_change_counts_it_once() -> None:
    model = Net(True, True).double()
    opt = OCNOpt(model.parameters(), 1e-4, model=model, feedback="nonlinear")
    x, y = batches(1)[0]
    before = model(x, y)["loss"]
    before.backward()
    opt.step()
    assert opt.diagnostics.predicted_change == pytest.approx((model(x, y)["loss"] - before).item(), rel=1e-6)

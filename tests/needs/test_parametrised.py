"""Weights that are computed from other parameters: weight norm, spectral norm, orthogonal and one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.toys import CLASSES, FEATURES, SOME_GAMES, B, batches, name_of, predicted, train, values
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from ocnopt import OCNOpt


class Positive(nn.Module):
    def forward(self, raw: Tensor) -> Tensor:
        return raw.exp()

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.abs().log()


def own(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Positive())


WAYS: list[Callable[[nn.Module], nn.Module]] = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    parametrizations.orthogonal,
    own,
]


def net(way: Callable[[nn.Module], nn.Module], width: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        way(nn.Linear(FEATURES, width).double()), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
        way(nn.Linear(width, CLASSES).double()),
    ).double()  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*(no adapter is registered|calls were not seen)")
@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_trains(way: Any, game: dict[str, Any]) -> None:
    model = net(way)
    opt = OCNOpt(model.parameters(), 0.05, model=model, damping=0.1, gauss_newton=0.1, **game)
    before = values(model)
    losses = train(model, opt, batches(1) * 12)
    assert losses[-1] < losses[0]
    assert all(t.isfinite().all() for t in values(model))
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=False)]
    assert all(moved), "every parameter trains"


@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_what_cannot_be_split_is_said(way: Any) -> None:
    model = net(way)
    opt = OCNOpt(model.parameters(), 0.05, model=model, rank=3)
    with pytest.warns(UserWarning, match="its gradient is not split") as caught:
        train(model, opt, batches(1))
    named = {str(w.message).split(":")[0] for w in caught}
    assert named
    assert all(name.startswith(("0.", "4.")) for name in named), "the plain layer in the middle is as plain as ever"


@pytest.mark.filterwarnings("ignore:.*(no adapter is registered|calls were not seen|does not run over)")
@pytest.mark.parametrize("way", [parametrizations.weight_norm, own], ids=lambda f: f.__name__)
def test_rows_of_a_weight_are_not_samples(way: Any) -> None:
    """With as many outputs as samples the shapes agree; the rows of the weight must not be taken for samples."""
    found = []
    for width in (B, B + 1):
        model = net(way, width)
        opt = OCNOpt(model.parameters(), 1e-6, model=model, rank=3, feedback="nonlinear", curvature="identity")
        train(model, opt, batches(1))
        measured = opt.diagnostics.s
        gap = measured - predicted(opt.diagnostics)
        # their gradients are shared out evenly, so with another width only the sum over the groups is predicted right
        gap = gap if width == B else gap.sum(1)
        found.append(gap.abs().max() / measured.abs().max())
    assert max(found) < 1e-3, found

"""A curvature and a layer of one's own, end to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from tests.toys import CLASSES, FEATURES, assert_identical, batches, mlp, state_of, train, values
from torch import Tensor, nn

import ocnopt
from ocnopt import Adapter, Call, Curvature, Metric, OCNOpt, Recompute
from ocnopt.groups import Groups
from ocnopt.layers import registry


class Constant(Metric):
    def __init__(self, diagonal: float) -> None:
        self.diagonal = diagonal

    def solve(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        return [v / self.diagonal for v in vectors]


class Stiff(Curvature):
    """A fixed multiple of the identity, which also counts its calls where a checkpoint finds them."""

    name = "stiff"

    def __init__(self, diagonal: float) -> None:
        self.diagonal = diagonal

    def measure(self, bucket: Any, a: Tensor | None) -> Metric:
        for state in bucket.states:
            state["measured"] = state.get("measured", 0) + 1
        return Constant(self.diagonal)


@pytest.mark.parametrize("feedback", ["linear", "nonlinear", "off"])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_curvature_of_ones_own(feedback: str, rank: int) -> None:
    """C = c·I is the identity with the learning rate divided by c (in consistent mode they are one)."""
    runs = []
    for lr, curvature in ((0.2, "identity"), (0.8, Stiff(4.0))):
        model = mlp()
        opt = OCNOpt(model.parameters(), lr, model=model, curvature=curvature, feedback=feedback, rank=rank)
        train(model, opt, batches(4))
        runs.append(values(model))
    torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-12)
    assert "stiff" in opt.summary()
    assert state_of(opt)[0]["measured"] == 4


def test_its_checkpoint_goes_by_name() -> None:
    model, curvature = mlp(), Stiff(4.0)
    opt = OCNOpt(model.parameters(), curvature=curvature)
    train(model, opt, batches(2))
    saved = opt.state_dict()
    assert saved["param_groups"][0]["curvature"] == "stiff"
    assert opt.param_groups[0]["curvature"] is curvature, "saving changes nothing"
    other = OCNOpt(mlp().parameters(), curvature=Stiff(2.0))
    mine = other.param_groups[0]["curvature"]
    other.load_state_dict(saved)
    assert other.param_groups[0]["curvature"] is mine
    assert state_of(other)[0]["measured"] == 2


def test_a_checkpoint_with_an_unknown_curvature_is_refused_before_anything_changes() -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), lr=0.5, curvature=Stiff(4.0))
    train(model, opt, batches(2))
    plain = OCNOpt(mlp().parameters())
    with pytest.raises(ValueError, match="the checkpoint has curvature 'stiff', this optimizer 'adaptive'"):
        plain.load_state_dict(opt.state_dict())
    assert plain.param_groups[0]["lr"] == 0.01
    assert plain.param_groups[0]["curvature"] == "adaptive"
    assert state_of(plain) == [{}] * 6


@pytest.mark.parametrize("feedback", ["linear", "nonlinear", "off"])
def test_curvature_by_group(feedback: str) -> None:
    model = mlp()
    groups = [
        {"params": list(model[0].parameters()), "curvature": "identity", "momentum": 0.0},
        {"params": list(model[1].parameters()), "curvature": "kronecker"},
        {"params": list(model[2].parameters()), "curvature": "adaptive", "ema": False},
    ]
    opt = OCNOpt(groups, 0.05, model=model, feedback=feedback, rank=3)
    losses = train(model, opt, batches(1) * 15)
    assert losses[-1] < losses[0]
    keys = [set(state) for state in state_of(opt)]
    assert keys[0] == {"step"}
    assert {"input_factor", "momentum"} <= keys[2]
    assert keys[4] == {"step", "momentum", "second_moment"}


# --- a layer of one's own ---


class Bilinear(nn.Module):
    """y_i = x_i ⊙ (U x_i): no layer kind that the package knows."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.U = nn.Parameter(torch.randn(features, features) / features)

    def forward(self, x: Tensor) -> Tensor:
        return x * (x @ self.U.T)


class BilinearAdapter(Adapter):
    def group_gradients(self, call: Call, groups: Groups) -> dict[str, Tensor]:
        return {"U": groups.sum(torch.einsum("bi,bj->bij", call.h * call.x, call.x))}


@pytest.fixture
def registered() -> Iterator[None]:
    before = dict(registry._ADAPTERS)
    yield
    registry._ADAPTERS.clear()
    registry._ADAPTERS.update(before)


def bilinear() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 4), Bilinear(4), nn.Tanh(), nn.Linear(4, CLASSES)).double()


def run(**options: Any) -> tuple[list[Tensor], str]:
    model = bilinear()
    opt = OCNOpt(model.parameters(), 0.1, model=model, rank=3, **options)
    train(model, opt, batches(3))
    return values(model), opt.summary()


@pytest.mark.parametrize(
    "options", [{"feedback": "linear"}, {"feedback": "nonlinear", "curvature": "identity"}], ids=str
)
def test_a_registered_layer_plays_by_groups(registered: None, options: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=r"1\.U: no adapter is registered for Bilinear; its gradient is not split"):
        unknown, table = run(**options)
    assert "no adapter is registered for Bilinear" in table
    ocnopt.register(Bilinear, BilinearAdapter())
    by_hand, table = run(**options)
    assert "BilinearAdapter" in table
    assert "no adapter" not in table
    ocnopt.register(Bilinear, Recompute())
    recomputed, _ = run(**options)
    torch.testing.assert_close(by_hand, recomputed, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(unknown[0], by_hand[0], rtol=1e-6), "groups matter here"


def test_what_an_adapter_leaves_out_is_trained_from_its_gradient(registered: None) -> None:
    class Shifted(Bilinear):
        def __init__(self, features: int) -> None:
            super().__init__(features)
            self.shift = nn.Parameter(torch.zeros(features))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.shift

    class KnowsU(BilinearAdapter):
        covers = ("U",)

    ocnopt.register(Shifted, KnowsU())
    torch.manual_seed(0)
    model = nn.Sequential(Shifted(FEATURES), nn.Tanh(), nn.Linear(FEATURES, CLASSES)).double()
    opt = OCNOpt(model.parameters(), model=model, rank=3)
    with pytest.warns(UserWarning, match=r"0\.shift: left out by its adapter; its gradient is not split"):
        train(model, opt, batches(2))
    assert model[0].shift.abs().sum() > 0


def test_an_optimizer_made_before_the_registration_still_works(registered: None) -> None:
    model = bilinear()
    opt = OCNOpt(model.parameters(), model=model, rank=3)
    ocnopt.register(Bilinear, BilinearAdapter())
    before = values(model)
    train(model, opt, batches(1))
    assert_identical([t.isfinite().all().item() for t in before], [True] * len(before))


@pytest.mark.parametrize("feedback", ["linear", "nonlinear", "off"])
def test_nothing_is_lost_when_it_fails(feedback: str) -> None:
    class Failing(Stiff):
        def measure(self, bucket: Any, a: Tensor | None) -> Metric:
            super().measure(bucket, a)
            raise ArithmeticError("no curvature today")

    model = mlp()
    groups = [{"params": model[0].parameters(), "curvature": "adaptive"}, {"params": model[1:].parameters()}]
    opt = OCNOpt(groups, model=model, curvature=Failing(4.0), feedback=feedback)
    before = values(model)
    with pytest.raises(ArithmeticError, match="no curvature today"):
        train(model, opt, batches(1))
    assert_identical(values(model), before)
    assert not any(state_of(opt))

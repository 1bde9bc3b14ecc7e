"""Modules as people write them: parameters around children, odd inputs and outputs, losses inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.toys import (
    CLASSES,
    FEATURES,
    SOME_GAMES,
    B,
    assert_identical,
    batches,
    mlp,
    name_of,
    state_of,
    train,
    values,
)
from torch import Tensor, nn
from torch.nn import functional as F

from ocnopt import OCNOpt

games = pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
quiet = pytest.mark.filterwarnings("ignore:.*(no adapter|were not seen|does not run over|has no gradient)")
WIDTH = 4


class ViT(nn.Module):
    """A class token and positions, as parameters of the module that holds the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos = nn.Parameter(torch.randn(1, FEATURES + 1, WIDTH))
        self.embed = nn.Linear(1, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, "gelu", batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.unsqueeze(-1))
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.layer(x)[:, 0])


class Constant(nn.Module):
    """Returns its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(WIDTH))

    def forward(self) -> Tensor:
        return self.value


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shift, self.head = nn.Linear(FEATURES, WIDTH), Constant(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x) + self.shift()))


class Value(nn.Module):
    """An output without a dimension of features."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.value, self.head = nn.Linear(FEATURES, WIDTH), Value(), nn.Linear(1, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.value(torch.tanh(self.first(x))).unsqueeze(1))


class Functional(nn.Module):
    """Layers whose parameters are used by hand; of one the bias is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.byhand, self.head = (
            nn.Linear(FEATURES, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(F.linear(self.first(x), self.byhand.weight)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unsqueeze(-1))[1][0][0])


NETS = [ViT, Shifted, Flat, Functional, Recurrent]


@quiet
@games
@pytest.mark.parametrize("net", NETS)
def test_trains_every_parameter_that_has_a_gradient(net: type[nn.Module], game: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = net().double()
    # in paper mode a large β may leave nothing for the first layers to do
    opt = OCNOpt(model.parameters(), 0.03, model=model, damping=0.1, gauss_newton=0.1, **game)
    before = values(model)
    losses = train(model, opt, batches(1) * 15)
    assert losses[-1] < losses[0]
    for (name, p), old in zip(model.named_parameters(), before, strict=True):
        assert p.isfinite().all()
        assert (not torch.equal(p, old)) == (p.grad is not None), name
    if game["feedback"] == "nonlinear":
        assert opt.diagnostics.predicted_change is not None


@pytest.mark.parametrize(
    ("net", "named"),
    [
        (ViT, {"cls", "pos"}),
        (Shifted, {"shift.value"}),
        (Flat, {"value.weight"}),
        (Functional, {"byhand.weight"}),
        (Recurrent, {"lstm.weight_ih_l0", "lstm.weight_hh_l0", "lstm.bias_ih_l0", "lstm.bias_hh_l0"}),
    ],
)
def test_says_what_is_not_split_into_groups(net: type[nn.Module], named: set[str]) -> None:
    torch.manual_seed(0)
    model = net().double()
    opt = OCNOpt(model.parameters(), 0.05, model=model, rank=3)
    with pytest.warns(UserWarning, match="not split into groups") as caught:
        train(model, opt, batches(1))
    assert {str(w.message).split(":")[0] for w in caught} == named


def test_a_kronecker_layer_without_its_bias_in_play() -> None:
    """The weight has a gradient, the bias of the same layer has none: the weight trains, and it is said how."""
    torch.manual_seed(0)
    model = Functional().double()
    opt = OCNOpt(model.parameters(), 0.05, model=model, curvature="kronecker")
    before = model.byhand.weight.detach().clone()
    with pytest.warns(UserWarning, match="byhand.weight: the rest of its layer has no gradient") as caught:
        train(model, opt, batches(3))
    assert len(caught) == 1, "once"
    assert not torch.equal(model.byhand.weight, before)


# --- inputs and outputs ---


@dataclass
class Answer:
    logits: Tensor
    penalty: Tensor


class Wrapped(nn.Module):
    """The same network behind different signatures."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.body = how, mlp()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.how == "dict in":
            x = args[0]["x"]
        elif self.how in ("kwargs", "loss"):
            x = kwargs["x"]
        else:
            x = args[0]
        out = self.body(x)
        if self.how == "loss":
            return F.cross_entropy(out, kwargs["y"])
        if self.how == "dict out":
            return {"aux": [torch.ones(2), None], "logits": out, "n": 3}
        if self.how == "tuple out":
            return out.detach(), out
        if self.how == "dataclass out":
            return Answer(out, out.square().mean())
        return out


def loss_of(model: Wrapped, x: Tensor, y: Tensor) -> Tensor:
    if model.how == "loss":
        return model(x=x, y=y)
    out = model({"x": x, "label": "a"}) if model.how == "dict in" else model(x=x) if model.how == "kwargs" else model(x)
    if isinstance(out, dict):
        out = out["logits"]
    elif isinstance(out, tuple):
        out = out[1]
    elif isinstance(out, Answer):
        out = out.logits
    return F.cross_entropy(out, y)


@games
@pytest.mark.parametrize("how", ["plain", "dict in", "kwargs", "dict out", "tuple out", "dataclass out", "loss"])
def test_signatures_do_not_matter(how: str, game: dict[str, Any]) -> None:
    runs = []
    for way in ("plain", how):
        model = Wrapped(way)
        opt = OCNOpt(model.parameters(), 0.1, model=model, **game)
        for x, y in batches(3):
            opt.zero_grad()
            loss_of(model, x, y).backward()
            opt.step()
        predicted = opt.diagnostics.predicted_change
        runs.append((values(model), state_of(opt), predicted))
    if how == "dataclass out" and game["feedback"] == "nonlinear":
        return  # opaque to us: where the chain ends is not known, so s is accumulated, the same to first order
    assert_identical(runs[1][:2], runs[0][:2])
    assert runs[1][2] == pytest.approx(runs[0][2], rel=0.2)


class Expert(nn.Module):
    """Adds to a list that the caller gave it, as mixtures of experts do with their auxiliary losses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor, losses: list[Tensor], *, cache: dict[str, Tensor]) -> Tensor:
        out = torch.tanh(x @ self.inner)
        losses.append(out.square().mean())
        cache["last"] = out.detach()
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert, self.head = nn.Linear(FEATURES, WIDTH), Expert(), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        cache: dict[str, Tensor] = {}
        x = self.first(x)
        out = self.head(self.expert(x, losses, cache=cache))
        assert len(losses) == 1, "the module wrote into a copy"
        assert "last" in cache
        return out + 0.1 * losses[0]


@quiet
@games
def test_containers_are_passed_on_and_not_copied(game: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Mixture().double()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    losses = train(model, opt, batches(1) * 8)
    assert losses[-1] < losses[0]


class Features(nn.Module):
    """Reads a list of tensors, as the layers of a DenseNet do; the list goes on growing."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(n * WIDTH, WIDTH) / 4)

    def forward(self, features: list[Tensor]) -> Tensor:
        return torch.tanh(torch.cat(features, 1) @ self.inner)


class ListNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList([Features(n) for n in (1, 2, 3)])
        self.head = nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.first(x)]
        for layer in self.layers:
            features.append(layer(features))
        return self.head(torch.cat(features, 1))


@quiet
@pytest.mark.parametrize("rank", [1, 3])
def test_lists_of_tensors_as_input(rank: int) -> None:
    """The gradient through such an edge is not known, so the change there is predicted: right to first order."""
    s = []
    for feedback in ("linear", "nonlinear"):
        torch.manual_seed(0)
        model = ListNet().double()
        opt = OCNOpt(
            model.parameters(), 1e-6, model=model, feedback=feedback, rank=rank, curvature="identity", momentum=0.0,
        )  # fmt: skip
        train(model, opt, batches(1))
        s.append([layer.s for layer in opt.diagnostics.layers if layer.name in ("layers.1", "layers.2")])
    assert s[1] == pytest.approx(s[0], rel=1e-3)


def test_the_model_itself_may_be_one_layer() -> None:
    runs = []
    for game in SOME_GAMES:
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, CLASSES).double()
        opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
        losses = train(model, opt, batches(1) * 6)
        assert losses[-1] < losses[0]
        assert [layer.name for layer in opt.diagnostics.layers] == ["(the model itself)"]
        runs.append(losses)
    assert len(runs) == len(SOME_GAMES)
    assert B

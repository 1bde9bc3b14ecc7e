"""A norm acts in the stage of the layer before it: who joins whom, in every way to find the stages."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exact.compare import check, optimizer
from tests.exact.nets import Net, real, seeded
from tests.games import markov
from tests.toys import CLASSES, FEATURES, batches, on_every_call, predicted, train
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from ocnopt import OCNOpt
from ocnopt.layers import Adapter, Recompute, register
from ocnopt.layers.norm import SyncBatchNormAdapter
from ocnopt.rollout import Measure

WIDTH = 4
Groups = list[set[str]]


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def chain(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *between, nn.Linear(WIDTH, CLASSES))


class Wired(nn.Module):
    """``stream``, the layers by name, and a residual connection past the last of them if ``around``."""

    def __init__(self, *stream: str, around: bool, **layers: nn.Module) -> None:
        super().__init__()
        self.stream, self.around = stream, around
        self.into, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        x = z = torch.tanh(self.into(x))
        for name in self.stream:
            z = torch.tanh(self.get_submodule(name)(z))
        return self.head(x + z if self.around else z)


class Functional(nn.Module):
    """A norm that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.gamma = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(layer_norm(self.into(x), (WIDTH,), self.gamma)))


def layers(*names: str) -> dict[str, nn.Module]:
    return {name: nn.LayerNorm(WIDTH) if name.startswith("n") else nn.Linear(WIDTH, WIDTH) for name in names}


#: network and the players of its stages
CASES: dict[str, tuple[Callable[[], nn.Module], Groups]] = {
    "first of all": (
        lambda: nn.Sequential(nn.LayerNorm(FEATURES), *chain()),
        [{"0"}, {"1"}, {"2"}],
    ),
    "two in a row": (
        lambda: chain(nn.LayerNorm(WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Tanh()),
        [{"0", "1", "3"}, {"5"}],
    ),
    "without parameters": (
        lambda: chain(nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Tanh()),
        [{"0"}, {"3"}],
    ),
    "frozen": (
        lambda: chain(frozen(nn.LayerNorm(WIDTH)), nn.Tanh(), nn.RMSNorm(WIDTH)),
        [{"0", "3"}, {"4"}],
    ),
    "after a frozen layer": (
        lambda: chain(nn.Tanh(), frozen(nn.Linear(WIDTH, WIDTH)), nn.LayerNorm(WIDTH), nn.Tanh()),
        [{"0"}, {"3"}, {"5"}],
    ),
    "after nothing but frozen layers": (
        lambda: nn.Sequential(frozen(nn.Linear(FEATURES, WIDTH)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)),
        [{"1"}, {"2"}],
    ),
    "used twice": (
        lambda: Wired("a", "n", "b", "n", around=False, **layers("a", "b", "n")),
        [{"into"}, {"a", "n"}, {"b"}, {"head"}],
    ),
    "after a layer that is used twice": (
        lambda: Wired("a", "b", "a", "n", around=False, **layers("a", "b", "n")),
        [{"into"}, {"a"}, {"b"}, {"n"}, {"head"}],
    ),
    "in a residual block": (
        lambda: Wired("n1", "a", "n2", "b", around=True, **layers("n1", "n2", "a", "b")),
        [{"into", "n1"}, {"a", "n2"}, {"b"}, {"head"}],
    ),
    "after a frozen layer of a residual block": (
        lambda: Wired("a", "b", "n", around=True, **(layers("a", "b", "n") | {"b": frozen(nn.Linear(WIDTH, WIDTH))})),
        [{"into"}, {"a"}, {"n"}, {"head"}],
    ),
}


def played(opt: OCNOpt) -> Groups:
    """The layers of each stage of the last step."""
    reports = opt.diagnostics.layers
    return [{r.name for r in reports if r.stage == k} for k in range(max(r.stage for r in reports) + 1)]


def make(build: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, OCNOpt]:
    with seeded(0):
        model = build().double()
    fixed = {"curvature": "identity", "momentum": 0.0, "clamp": False, "feedback": "nonlinear", "gauss_newton": 0.1}
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, OCNOpt(trained, model=model, **(fixed | options))


WAYS: list[dict[str, Any]] = [
    {"state": "live"},
    {"state": "accumulated"},
    {"state": "accumulated", "rank": 3},
    {"feedback": "linear", "rank": 3},
    {"feedback": "linear", "bellman": "paper"},
]


@pytest.mark.parametrize("options", WAYS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("name", CASES)
def test_who_acts_together(name: str, options: dict[str, Any]) -> None:
    build, expected = CASES[name]
    model, opt = make(build, lr=1e-3, **options)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, opt, batches())
    assert played(opt) == expected
    moved = [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert moved == [p.requires_grad for p in model.parameters()]


@pytest.mark.parametrize("frozen_too", [False, True])
def test_norms_with_tied_weights_act_before_the_first_of_them_runs(frozen_too: bool) -> None:
    """Whatever their names, and whoever else is in the stage."""
    seen: list[Tensor] = []

    def build() -> nn.Module:
        model = Wired("a", "n2", "look", "n1", around=False, look=nn.Identity(), **layers("a", "n1", "n2"))
        model.n1.weight, model.n1.bias = model.n2.weight, model.n2.bias
        model.a.requires_grad_(not frozen_too)
        on_every_call(model.look, lambda out: seen.append(model.n2.weight.detach().clone()))
        return model

    model, opt = make(build, lr=1e-3, state="accumulated")
    train(model, opt, batches())
    assert played(opt) == [{"into"}, {"n2"} if frozen_too else {"a", "n2"}, {"head"}]
    assert len(seen) == 2
    assert torch.equal(seen[1], model.n2.weight)
    assert not torch.equal(*seen)


@pytest.mark.parametrize("options", WAYS[:3], ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("name", [name for name in CASES if "used twice" not in name])
def test_what_a_tiny_step_changes_is_what_the_kernels_predict(name: str, options: dict[str, Any]) -> None:
    """A layer that is used twice acts before its second use, which no prediction for a stage knows of."""
    model, opt = make(CASES[name][0], lr=1e-6, **options)
    train(model.eval(), opt, batches())  # batch statistics would couple the samples of different groups
    s = opt.diagnostics.s
    torch.testing.assert_close(s, predicted(opt.diagnostics), rtol=1e-3, atol=1e-9 * float(s.abs().max()))
    assert s.abs().max() > 0


def test_where_no_call_is_seen_the_order_of_definition_stands_in() -> None:
    """With containers and activations in between, which are nobody's neighbours."""
    inner = nn.Tanh(), nn.Sequential(nn.LayerNorm(WIDTH)), nn.Tanh()
    model, opt = make(lambda: nn.Sequential(chain(*inner), nn.LayerNorm(CLASSES)), feedback="linear", lr=1e-3)
    train(model, opt, batches())
    assert played(opt) == [{"0.0", "0.2.0"}, {"0.4", "1"}]
    assert [row.split()[3] for row in opt.summary().splitlines()[2:-1]] == ["0"] * 4 + ["1"] * 4


def test_a_norm_inside_a_stage_of_a_chain_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, measure = [], Measure.__call__
    monkeypatch.setattr(Measure, "__call__", lambda self, *args: measured.append(args) or measure(self, *args))
    norms = (nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
    model, opt = make(lambda: chain(*norms), lr=1e-3)
    train(model, opt, batches())
    assert played(opt) == [{"0", "1"}, {"3", "4"}, {"6"}]
    assert len(measured) == 2  # nothing has changed what the first stage sees


@pytest.mark.parametrize("feedback", ["nonlinear", "linear"])
@pytest.mark.parametrize("bellman", ["consistent", "paper"])
def test_batch_statistics_against_the_dense_solver(bellman: str, feedback: str) -> None:
    """They couple the samples: exact at rank 1."""
    with seeded(1):
        norms = [nn.BatchNorm1d(n, track_running_stats=False) for n in (5, 3)]
        linear = [nn.Linear(4, 5, bias=False), nn.Linear(5, 3, bias=False)]  # a norm leaves nothing of a bias
        net = Net([nn.Sequential(linear[0], norms[0], nn.Tanh()), nn.Sequential(linear[1], norms[1])], real(4))
    options = {"curvature": "adaptive", "lr": 0.1, "eps": 1e-2, "momentum": 0.5, "gauss_newton": 0.2}
    check(net, optimizer(net, feedback=feedback, bellman=bellman, **options))


def test_a_norm_that_is_no_module_has_a_stage_of_its_own() -> None:
    model, opt = make(Functional, lr=1e-6)
    train(model, opt, batches())
    assert played(opt) == [{"into"}, {"gamma"}, {"head"}]
    torch.testing.assert_close(opt.diagnostics.s, predicted(opt.diagnostics), rtol=1e-3, atol=1e-12)


class Woven(nn.Module):
    """Beside a path of three layers: what ``short`` makes of the players by their names."""

    def __init__(self, short: Callable[[Callable[[str, Tensor], Tensor], Tensor], Tensor], *names: str) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.path = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.short = short
        for name, layer in layers(*names).items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        z = self.into(x)
        return self.head(self.path(z) + self.short(lambda name, t: self.get_submodule(name)(t), z))


WOVEN: dict[str, tuple[Callable[[], nn.Module], list[list[str]], Groups]] = {
    # the norm could wait for the path, but it stays where its neighbour is
    "alone": (
        lambda: Woven(lambda p, z: p("n", z), "n"),
        [],
        [{"into", "n"}, {"path.0"}, {"path.1"}, {"path.2"}, {"head"}],
    ),
    # of the two that read a, the norm could wait longer
    "beside a layer": (
        lambda: Woven(lambda p, z: p("n", a := p("a", z)) + p("c", a), "a", "n", "c"),
        [["a", "n", "c"]],
        [{"into"}, {"path.0"}, {"path.1", "a", "n"}, {"path.2", "c"}, {"head"}],
    ),
    # it goes with whichever is later
    "after two": (
        lambda: Woven(lambda p, z: p("c", p("n", p("a", z) + p("b", z))), "a", "b", "n", "c"),
        [["a"], ["b"], ["c"]],
        [{"into"}, {"path.0"}, {"path.1", "a", "b", "n"}, {"path.2", "c"}, {"head"}],
    ),
}


@pytest.mark.parametrize("name", WOVEN)
def test_a_norm_has_no_time_of_its_own(name: str) -> None:
    build, branches, expected = WOVEN[name]
    model, opt = make(build, lr=1e-3, alignment="last")
    train(model, opt, batches())
    assert [[node.target for node in branch.nodes] for branch in opt.game.branches] == branches
    assert played(opt) == expected


def test_late_branches_take_their_norms_along() -> None:
    model, opt = make(markov.Normed, lr=1e-3, alignment="last")
    train(model, opt, batches())
    assert [(b.name, [n.target for n in b.nodes], b.first, b.slack) for b in opt.game.branches] == [
        ("skip", ["skip", "n2"], 1, 1)
    ]
    assert played(opt) == [{"into", "n0"}, {"a", "n1"}, {"b", "skip", "n2", "n3"}, {"head"}]


def test_a_norm_whose_gradients_cannot_be_split_joins_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SyncBatchNormAdapter, "refusal", lambda self, module: "of several processes")
    model, opt = make(lambda: chain(nn.SyncBatchNorm(WIDTH), nn.Tanh()).eval(), lr=1e-3, rank=3)
    with pytest.warns(UserWarning, match="of several processes"):
        train(model, opt, batches())
    assert "of several processes: groups share p.grad" in opt.summary()
    assert played(opt) == [{"0", "1"}, {"3"}]


def test_own_layers_that_join() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    class Joining(Recompute):
        joins = True

    for adapter, expected in ((Recompute(), [{"0"}, {"1"}, {"2"}]), (Joining(), [{"0", "1"}, {"2"}])):
        register(Scale, adapter)
        model, opt = make(lambda: chain(Scale()), lr=1e-3, rank=3)
        train(model, opt, batches())
        assert played(opt) == expected
    assert not Adapter.joins


def test_a_drawing_has_one_box_for_both(tmp_path: Path) -> None:
    model = markov.Normed()
    game = OCNOpt(model.parameters(), model=model).game.trace(torch.randn(2, 5))
    text = game.draw(tmp_path / "game.svg")
    assert "stage   1  a, n1, skip, n2\n           on tanh → a + skip\n" in text
    drawn = ET.parse(tmp_path / "game.svg").getroot()
    labels = [t.text for t in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert labels[:7] == ["into · n0", "a · n1", "b", "skip · n2", "add · n3", "head", "output"]

"""Several forward and backward passes before one step are one large batch: 1 × 12 is 4 × 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.toys import CLASSES, FEATURES, GAMES, SOME_GAMES, batches, mlp, name_of, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt

SIZE = 12
#: more than any layer before has: otherwise its adjoints span a part of its outputs, and the eigenbasis of the rest is
#: anybody's choice
OUTPUTS = 6


class Residual(nn.Module):
    """Not a chain: a skip with parameters, a layer used twice, a layer that not every parameter of is a player."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.body, self.skip, self.out = (
            nn.Linear(FEATURES, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, OUTPUTS)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x).tanh()
        x = self.body(self.body(x).tanh()).tanh() + self.skip(x)
        return self.out(x)


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(1, 3, 3), nn.GroupNorm(1, 3), nn.Linear(9, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x.unsqueeze(1))).tanh().flatten(1))


NETS = {"chain": mlp, "residual": Residual, "picture": Picture}


def make(net: str) -> nn.Module:
    torch.manual_seed(0)
    return NETS[net]().double()


def trained(net: str, sizes: Sequence[int], steps: int = 4, **options: Any) -> list[Tensor]:
    """Parameters after some steps, each of several passes of the given sizes."""
    model = make(net)
    opt = OCNOpt(
        model.parameters(), model=model, **({"lr": 0.3, "eps": 1e-2, "damping": 0.1, "refresh_every": 2} | options)
    )
    for x, y in batches(steps, size=SIZE):
        opt.zero_grad()
        for xs, ys in zip(x.split(list(sizes)), y.split(list(sizes)), strict=True):
            (cross_entropy(model(xs), ys, reduction="sum") / len(y)).backward()
        opt.step()
    return values(model)


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("game", GAMES, ids=name_of)
def test_equal_micro_batches(game: dict[str, Any]) -> None:
    assert_same(trained("chain", [3, 3, 3, 3], **game), trained("chain", [12], **game))


@pytest.mark.parametrize("sizes", [[6, 6], [5, 2, 4, 1]], ids=str)
@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
@pytest.mark.parametrize("net", ["residual", "picture"])
def test_networks_and_sizes_of_all_kinds(net: str, game: dict[str, Any], sizes: list[int]) -> None:
    assert_same(trained(net, sizes, **game), trained(net, [12], **game))


@pytest.mark.parametrize("rank", [2, 5, 7])
@pytest.mark.parametrize("feedback", ["linear", "nonlinear"])
def test_groups_that_go_on_from_one_pass_to_the_next(rank: int, feedback: str) -> None:
    options = {"curvature": "identity", "rank": rank, "feedback": feedback}
    assert_same(trained("residual", [7, 5], **options), trained("residual", [12], **options))


@pytest.mark.parametrize(
    "options", [{"momentum": 0.5, "weight_decay": 0.1}, {"game": "noncooperative"}, {"maximize": True}]
)
def test_other_options(options: dict[str, Any]) -> None:
    options = {"feedback": "nonlinear", "rank": 3, "lr": 0.05} | options
    assert_same(trained("residual", [4, 8], **options), trained("residual", [12], **options))


@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_forward_passes_first_and_one_backward_pass(game: dict[str, Any]) -> None:
    """The order of the samples is that of the forward passes, not that in which autograd comes by."""
    model = make("residual")
    opt = OCNOpt(model.parameters(), 0.3, model=model, eps=1e-2, damping=0.1, refresh_every=2, **game)
    for x, y in batches(4, size=SIZE):
        opt.zero_grad()
        outputs = [model(xs) for xs in x.split([5, 7])]
        cross_entropy(torch.cat(outputs), y).backward()
        opt.step()
    assert_same(values(model), trained("residual", [12], **game))


def test_passes_with_other_numbers_in_the_code_keep_their_own() -> None:
    """A factor that grows from pass to pass is part of the data flow of each pass."""

    class Growing(Residual):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            self.factor = 1.5 - self.factor
            return self.out(self.factor * self.skip(self.into(x).tanh()) + self.into(x).tanh())

    class Together(Growing):
        def forward(self, x: Tensor) -> Tensor:
            scale = torch.tensor([0.5] * 6 + [1.0] * 6, dtype=x.dtype).unsqueeze(1)
            return self.out(scale * self.skip(self.into(x).tanh()) + self.into(x).tanh())

    found = []
    for kind, sizes in ((Growing, [6, 6]), (Together, [12])):
        torch.manual_seed(0)
        model = kind().double()
        del model.body
        opt = OCNOpt(model.parameters(), 0.3, model=model, feedback="nonlinear")
        for x, y in batches(4, size=SIZE):
            opt.zero_grad()
            for xs, ys in zip(x.split(sizes), y.split(sizes), strict=True):
                (cross_entropy(model(xs), ys, reduction="sum") / len(y)).backward()
            opt.step()
        assert opt.game.why_accumulated is None
        found.append(values(model))
    assert_same(*found)


@pytest.mark.parametrize("game", SOME_GAMES[1:], ids=name_of)
def test_passes_of_other_batches_leave_no_trace(game: dict[str, Any]) -> None:
    """An evaluation between two passes, a pass without backward, and gradients thrown away in the middle."""
    model = make("residual")
    opt = OCNOpt(model.parameters(), 0.3, model=model, eps=1e-2, damping=0.1, refresh_every=2, **game)
    (other, labels), *_ = batches(1, size=7, seed=9)
    for x, y in batches(4, size=SIZE):
        cross_entropy(model(other), labels).backward()
        opt.zero_grad()
        for xs, ys in zip(x.split(4), y.split(4), strict=True):
            (cross_entropy(model(xs), ys, reduction="sum") / len(y)).backward()
            with torch.no_grad():
                model(other)
            model(other)
        opt.step()
    assert_same(values(model), trained("residual", [12], **game))


def test_dropout_draws_what_each_pass_drew() -> None:
    """With learning rate 0 the second run of every pass must find no change at all."""
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    opt = OCNOpt(model.parameters(), 0.0, model=model, feedback="nonlinear", rank=4)
    for x, y in batches(3, size=SIZE):
        opt.zero_grad()
        for xs, ys in zip(x.split(4), y.split(4), strict=True):
            cross_entropy(model(xs), ys).backward()
        opt.step()
        assert opt.diagnostics.s is not None
        assert opt.diagnostics.s.abs().max() == 0
        assert opt.diagnostics.predicted_change == 0


FOLDED = [
    {"curvature": "identity", "rank": 3},
    {"curvature": "adaptive", "rank": "full"},
    {"curvature": "adaptive", "rank": 2, "bellman": "paper"},
]


@pytest.mark.parametrize("sizes", [[3, 3, 3, 3], [6, 6]], ids=str)
@pytest.mark.parametrize("game", FOLDED, ids=name_of)
@pytest.mark.parametrize("net", NETS)
def test_said_beforehand(net: str, game: dict[str, Any], sizes: list[int]) -> None:
    assert_same(trained(net, sizes, accumulate=len(sizes), **game), trained(net, [12], **game))


def test_said_beforehand_it_takes_r_gradients_of_memory() -> None:
    """However many passes there are, and however large: only the last one's tape is there."""
    held = []
    for accumulate, passes in ((1, 4), (4, 4)):
        model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))
        opt = OCNOpt(model.parameters(), model=model, rank=2, accumulate=accumulate)
        for x, y in batches(passes, size=1000, dtype=torch.float32):
            cross_entropy(model(x), y).backward()
            held.append(opt.memory_usage()["tape"])
    parameters = 4 * sum(p.numel() for p in model.parameters())
    kept, (tape, *folded) = held[:4], held[4:]
    assert kept == [tape + 2 * parameters, 2 * tape, 3 * tape, 4 * tape]  # the first one could be all: it is split
    assert folded == [tape + n * parameters for n in (1, 1, 2)]  # the second group begins in the third pass


@pytest.mark.parametrize("sizes", [[4, 4], [4, 4, 4, 4, 2], [4, 4, 4, 1]], ids=str)
def test_another_number_of_passes_than_was_said(sizes: list[int]) -> None:
    """The end of an epoch: groups without samples are left out, and the last one takes what is over."""
    model, found = make("residual"), []
    opt = OCNOpt(model.parameters(), 0.3, model=model, curvature="identity", rank=4, accumulate=4)
    for x, y in batches(2, size=sum(sizes)):
        opt.zero_grad()
        for xs, ys in zip(x.split(sizes), y.split(sizes), strict=True):
            (cross_entropy(model(xs), ys, reduction="sum") / len(y)).backward()
        opt.step()
        found.append(opt.diagnostics.w)
    expected = {2: [4, 4], 5: [4, 4, 4, 6], 4: [4, 4, 4, 1]}[len(sizes)]
    assert [len(w[0]) for w in found] == [len(expected)] * 2
    precision = torch.tensor(expected, dtype=torch.float64) / sum(expected)
    assert torch.allclose(opt.diagnostics.policy.precision, precision)


def test_clipping_after_accumulation_is_honoured() -> None:
    found = []
    for sizes in ([12], [3, 3, 3, 3]):
        model = make("residual")
        opt = OCNOpt(model.parameters(), 0.3, model=model, rank=3, accumulate=len(sizes))
        for x, y in batches(4, size=SIZE):
            opt.zero_grad()
            for xs, ys in zip(x.split(sizes), y.split(sizes), strict=True):
                (cross_entropy(model(xs), ys, reduction="sum") / len(y)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
        found.append(values(model))
    assert_same(*found)


def test_a_layer_that_only_some_passes_go_through() -> None:
    class Choice(Residual):
        def forward(self, x: Tensor) -> Tensor:
            y = self.into(x).tanh()
            return self.out(self.skip(y) if x[0, 0] > 0 else self.body(y))

    found = []
    for accumulate in (1, 3):
        torch.manual_seed(0)
        model = Choice().double()
        opt = OCNOpt(model.parameters(), 0.3, model=model, rank=3, accumulate=accumulate)
        for x, y in batches(4, size=SIZE):
            x[:, 0] = x[:, 0].abs() * torch.tensor([-1.0] * 4 + [1.0] * 8, dtype=x.dtype)
            opt.zero_grad()
            for xs, ys in zip(x.split(4), y.split(4), strict=True):
                (cross_entropy(model(xs), ys, reduction="sum") / len(y)).backward()
            opt.step()
        found.append(values(model))
    assert_same(*found)


def test_a_network_that_cannot_run_by_stages_is_refused_and_nothing_is_lost() -> None:
    model = make("residual")
    opt = OCNOpt(model.parameters(), model=model, feedback="nonlinear", state="accumulated")
    before = values(model)
    for x, y in batches(2):
        cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match=r"over 2 forward passes needs .* by stage.*state='accumulated'.*one pass"):
        opt.step()
    for a, b in zip(values(model), before, strict=True):
        assert torch.equal(a, b)
    opt.zero_grad()
    (x, y), *_ = batches(1)
    cross_entropy(model(x), y).backward()
    opt.step()


def test_a_layer_called_by_itself_is_refused() -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, rank=2)
    (x, y), *_ = batches(1)
    (cross_entropy(model(x), y) + model[0][0](x).sum()).backward()
    with pytest.raises(RuntimeError, match=r"rank=2 needs forward passes of the attached model itself, but '0\.0'"):
        opt.step()

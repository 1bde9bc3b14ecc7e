"""What a graph of ``opt.step()`` has frozen: whoever changes it gets an ordinary step, and then another graph."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.emulated import emulate
from tests.replaying import NONLINEAR, assert_same, both, data, make, train, tuned, warm
from tests.toys import batches, hooks_on
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt, replays


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)


def both_with(change: Callable[[nn.Module, OCNOpt, int], None], make: Callable[..., Any], **options: Any) -> list[Any]:
    """Two trainings in which something is changed before a step, the first with replays before and after it."""
    trainings = []
    for graphed in (None, False):
        model, opt = make(graphed=graphed, **options)
        found = []
        for i, batch in enumerate(batches(30)):
            change(model, opt, i)
            found += train(model, opt, [batch])
        trainings.append((model, opt))
        if graphed is None:
            assert found[14] is None, found
    assert_same(*trainings)
    return trainings


def normed(**options: Any) -> tuple[nn.Module, OCNOpt]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 4)).double()
    model[3].eval()
    return model, OCNOpt(model.parameters(), 0.05, model=model, curvature="identity", **options)


LOOKING = [NONLINEAR, {"rank": 3}, {**NONLINEAR, "rank": 3}]


@pytest.mark.parametrize("game", LOOKING, ids=str)
def test_settings_of_layers(game: dict[str, Any]) -> None:
    def change(model: Any, opt: OCNOpt, i: int) -> None:
        if i == 16:
            model[1].eps = 0.5

    trainings = both_with(change, normed, **game)
    assert trainings[0][1]._replays.reason is None


@pytest.mark.parametrize("game", LOOKING, ids=str)
def test_buffers_that_are_replaced(game: dict[str, Any]) -> None:
    def change(model: Any, opt: OCNOpt, i: int) -> None:
        if i == 16:
            model[3].running_mean = torch.full((6,), 0.3, dtype=torch.float64)

    trainings = both_with(change, normed, **game)
    assert trainings[0][1]._replays.reason is None


class Averaging(nn.Module):
    """Puts another tensor in the place of a buffer at each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        out: Tensor = self.last(h - self.mean)
        return out


def test_a_buffer_that_is_replaced_at_each_pass() -> None:
    model, opt = tuned(Averaging())
    assert train(model, opt, batches(20))[-1] == "what the step reads is somewhere else at each step"


def test_weights_that_others_train() -> None:
    def frozen(**options: Any) -> tuple[nn.Module, OCNOpt]:
        model, _ = normed()
        for p in model[0].parameters():
            p.requires_grad_(False)
        mine = [p for p in model.parameters() if p.requires_grad]
        return model, OCNOpt(mine, 0.05, model=model, **NONLINEAR, **options)

    def change(model: Any, opt: OCNOpt, i: int) -> None:
        if i == 16:
            model[0].weight.data = model[0].weight.data * 0.5

    both_with(change, frozen)


@pytest.mark.parametrize("game", [{}, *LOOKING, {"curvature": "kronecker"}], ids=str)
def test_state_that_is_cleared(game: dict[str, Any]) -> None:
    trainings = warm("residual", **game)
    for model, opt in trainings:
        opt.state.clear()
        train(model, opt, data("residual", 9))
    assert_same(*trainings)
    assert trainings[0][1].state


def test_an_input_that_was_overwritten() -> None:
    (model, opt), _ = warm("residual", **NONLINEAR)
    (x, y), *_ = data("residual", 1)
    opt.zero_grad()
    cross_entropy(model(x), y).backward()
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        opt.step()


class Attending(nn.Module):
    """The same mask by one name or another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 3)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.name = "key_padding_mask"

    def forward(self, x: Tensor) -> Tensor:
        h, mask = self.first(x[..., None]), {self.name: torch.eye(5, dtype=torch.bool)}
        out: Tensor = self.last(self.attention(h, h, h, need_weights=False, **mask)[0].mean(1))
        return out


def test_arguments_of_layers() -> None:
    trainings = []
    for graphed in (None, False):
        torch.manual_seed(0)
        model = Attending().double()
        opt = OCNOpt(model.parameters(), 0.05, model=model, rank=2, curvature="identity", graphed=graphed)
        train(model, opt, batches(16, size=5))
        model.name = "attn_mask"
        train(model, opt, batches(12, size=5))
        trainings.append((model, opt))
    assert trainings[0][1]._replays.captures == 2
    assert_same(*trainings)


def test_a_closure_after_replays() -> None:
    (model, opt), _ = warm("residual", **NONLINEAR)
    (x, y), *_ = data("residual", 1)

    def closure() -> float:
        opt.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    opt.step(closure)
    assert opt.diagnostics.actual_change is not None


def test_an_optimizer_that_is_forgotten_is_gone_at_once() -> None:
    ours, _ = warm("residual", **NONLINEAR)
    model, there = ours[0], weakref.ref(ours[1])
    gc.collect()
    gc.disable()
    try:
        del ours
        assert there() is None
        assert not hooks_on(model)
    finally:
        gc.enable()


def test_graphs_of_other_players_are_given_up() -> None:
    trainings = warm("residual")
    for model, opt in trainings:
        for i in range(12):
            model.block.bias.requires_grad_(i % 2 == 0)  # type: ignore[union-attr]
            train(model, opt, data("residual", 7))
    assert trainings[0][1]._replays.reason is None
    assert len(trainings[0][1]._replays._kinds) < 3
    assert_same(*trainings)


def test_the_same_number_again_is_no_change() -> None:
    model, opt = make("residual", weight_decay=0.1)
    for batch in data("residual", 9):
        opt.param_groups[0]["weight_decay"] = float("0.1")
        found = train(model, opt, [batch])
    assert found == [None]


def test_graphs_share_memory_as_long_as_one_of_them_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory whose last graph is gone is given back, and torch refuses to capture into it."""
    made: list[object] = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: made.append(object()) or made[-1])
    model, opt = make("residual", **NONLINEAR)
    train(model, opt, [*data("residual", 13), *data("residual", 13, size=4)])
    assert (opt._replays.captures, len(made)) == (2, 1)
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(model, opt, data("residual", 9))
    assert (opt._replays.captures, len(made)) == (3, 2)


@pytest.mark.parametrize("graphed", [None, True])
def test_large_copies_are_made_if_they_are_asked_for(graphed: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replays, "_room", lambda device: 100)
    model, opt = make("residual", **NONLINEAR, graphed=graphed)
    found = train(model, opt, data("residual", 13))[-1]
    assert found is None if graphed else str(found).startswith("a copy of what the step reads takes 0 MiB")


def test_too_little_memory_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(replays, "Places", refuse)
    ours, theirs, reasons = both("residual", data("residual", 13), **NONLINEAR)
    assert reasons[-1] == "there is too little memory for a copy of what the step reads"
    assert_same(ours, theirs)

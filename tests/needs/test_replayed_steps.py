"""``opt.step()`` from a graph of itself. Graphs are emulated here; tests/gpu has the real ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.emulated import Graph, emulate
from tests.replaying import GAMES, NONLINEAR, assert_same, both, data, make, train, tuned, warm
from tests.toys import batches
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt, intake, readings, replays, whole_step
from ocnopt.fused import dots
from ocnopt.problem import Problem
from ocnopt.readings import Products, Reading


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    Graph.replays = 0


@pytest.mark.parametrize("kind", ["chain", "residual"])
@pytest.mark.parametrize("game", GAMES, ids=lambda g: "-".join(map(str, g.values())))
def test_the_numbers_are_those_of_ordinary_steps(kind: str, game: dict[str, Any]) -> None:
    ours, theirs, reasons = both(kind, data(kind, 22), **game)
    assert_same(ours, theirs)
    assert reasons.count(None) >= 5, reasons
    assert Graph.replays == reasons.count(None)


def _dots(pairs: list[dots.Pair]) -> Tensor:
    """As the kernels of a GPU form them."""
    return torch.cat([(pair.x * pair.y).reshape(pair.rows or 1, -1).sum(1) for pair in pairs])


@pytest.mark.parametrize("held", [0, 2**30])
@pytest.mark.parametrize("kind", ["chain", "residual"])
@pytest.mark.parametrize("game", [NONLINEAR, {**NONLINEAR, "rank": 3}], ids=str)
def test_products_that_were_formed_together_are_read_where_they_are(
    kind: str, game: dict[str, Any], held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make(kind, **game, graphed=False)
    train(*plain, data(kind, 22))
    monkeypatch.setattr(readings, "_HELD", held)
    monkeypatch.setattr(dots, "can_wait", lambda x, y: True)
    monkeypatch.setattr(dots, "dots", _dots)
    ours, theirs, reasons = both(kind, data(kind, 22), **game)
    assert_same(ours, theirs)
    assert_same(ours, plain)
    assert reasons.count(None) >= 5, reasons


def test_products_in_another_order_make_another_kind_of_step() -> None:
    shared, two = Products(torch.tensor([2.0, 3.0])), [Reading(torch.ones(()), None) for _ in range(2)]

    def kind(*places: int) -> Any:
        found: list[Tensor] = []
        for reading, first in zip(two, places, strict=True):
            reading.adjoint, reading.among = torch.ones(()), (shared, first)
        there, numbers = {}, [2.0, 3.0]
        kind = intake._arrived(two, found, there)
        assert list(there) == [shared]
        assert len(found) == 2
        assert [float(reading.before) for reading in two] == [numbers[first] for first in places]
        return kind

    assert kind(0, 1) == kind(0, 1) != kind(1, 0)


@pytest.mark.parametrize("rate", [0.3, torch.tensor(0.3, dtype=torch.float64)])
@pytest.mark.parametrize("game", [{}, NONLINEAR, {"curvature": "kronecker"}], ids=str)
def test_schedulers_are_followed(game: dict[str, Any], rate: float | Tensor) -> None:
    trainings = warm("residual", **game)
    for model, opt in trainings:
        opt.param_groups[0]["lr"] = rate if isinstance(rate, float) else rate.clone()
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
        for batch in data("residual", 20)[:8]:
            train(model, opt, [batch])
            schedule.step()
    assert trainings[0][1]._replays.reason is None
    assert_same(*trainings)


@pytest.mark.parametrize("game", [{"momentum": 0.5}, {"weight_decay": 0.1}, {"gauss_newton": 3.0}, {"decay": 0.5}])
def test_other_hyper_parameters_make_other_graphs(game: dict[str, Any]) -> None:
    trainings = warm("residual", **NONLINEAR)
    for model, opt in trainings:
        opt.param_groups[0].update(game)
        found = train(model, opt, data("residual", 8))
    assert trainings[0][1]._replays.captures == 2
    assert found[-1] == "graphed=False"
    assert_same(*trainings)


def test_a_batch_of_another_size_is_an_ordinary_step_and_then_the_graph_goes_on() -> None:
    trainings = warm("residual", **NONLINEAR)
    seen = [*data("residual", 2), *data("residual", 1, size=4), *data("residual", 2)]
    found = [train(*each, seen) for each in trainings]
    assert found[0][2] is not None
    assert found[0][-1] is None
    assert trainings[0][1]._replays.captures == 1
    assert_same(*trainings)


def test_what_the_user_holds_is_not_written_to() -> None:
    """Inputs, gradients and outputs of the step that was captured."""
    model, opt = make("residual", **NONLINEAR)
    held: list[tuple[Tensor, Tensor]] = []
    for x, y in data("residual", 13):
        opt.zero_grad()
        out = model(x)
        cross_entropy(out, y).backward()
        kept = [x, out, *(p.grad for p in model.parameters() if p.grad is not None)]
        held += [(t, t.detach().clone()) for t in kept]
        opt.step()
    assert opt._replays.reason is None
    for t, before in held:
        assert torch.equal(t, before)


def test_numbers_in_the_code_of_the_model_are_followed() -> None:
    trainings = warm("residual", **NONLINEAR)
    for model, opt in trainings:
        for i, batch in enumerate(data("residual", 16)):
            model.scale = 1.0 if i % 3 else 0.5  # type: ignore[assignment]
            train(model, opt, [batch])
    assert_same(*trainings)


def test_gradients_that_stay_where_they_are() -> None:
    trainings = warm("residual", **NONLINEAR)
    for model, opt in trainings:
        for x, y in data("residual", 5):
            cross_entropy(model(x), y).backward()
            opt.step()
            opt.zero_grad(set_to_none=False)
    assert trainings[0][1]._replays.reason is None
    assert_same(*trainings)


@pytest.mark.parametrize("game", [{}, NONLINEAR, {"rank": 3}, {"curvature": "kronecker"}], ids=str)
def test_a_step_that_is_not_finite_leaves_no_trace(game: dict[str, Any]) -> None:
    trainings = warm("residual", **game)
    (x, y), *rest = data("residual", 4)
    for model, opt in trainings:
        before = [p.detach().clone() for p in model.parameters()]
        train(model, opt, [(x * float("nan"), y)])
        for p, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(p, value)
        for buffer in model.buffers():
            buffer.nan_to_num_()
        train(model, opt, rest)
        with pytest.warns(UserWarning, match="skipped"):
            assert opt.diagnostics.skipped_steps == 1
    assert trainings[0][1]._replays.reason is None
    assert_same(*trainings)


@pytest.mark.parametrize("game", [{}, NONLINEAR], ids=str)
def test_state_that_is_loaded_is_gone_on_with(game: dict[str, Any]) -> None:
    trainings = warm("residual", **game)
    for model, opt in trainings:
        saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
        train(model, opt, data("residual", 3))
        model.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
        train(model, opt, data("residual", 9))
    assert trainings[0][1]._replays.reason is None
    assert_same(*trainings)


def test_parameters_that_are_put_somewhere_else() -> None:
    trainings = warm("residual", **NONLINEAR)
    for model, opt in trainings:
        for p in model.parameters():
            p.data = p.data.clone()
        found = train(model, opt, data("residual", 9))
    assert found[0] == "graphed=False"
    assert trainings[0][1]._replays.captures == 2
    assert_same(*trainings)


def test_what_a_step_reports_stays_what_it_was() -> None:
    trainings = warm("residual", **NONLINEAR)
    reports = []
    for model, opt in trainings:
        first = opt.diagnostics
        train(model, opt, data("residual", 3))
        reports.append((str(first), first.predicted_change, str(opt.diagnostics), opt.diagnostics.predicted_change))
    assert reports[0][0] == reports[1][0]
    assert reports[0][0] != reports[0][2] == reports[1][2]
    assert reports[0][1] == pytest.approx(reports[1][1])
    assert reports[0][3] == pytest.approx(reports[1][3])


def test_others_train_in_between() -> None:
    """A pass of which nothing comes, one that is only looked at, and one without gradients."""
    trainings = warm("residual", **NONLINEAR)
    for model, opt in trainings:
        for x, y in data("residual", 5):
            with torch.no_grad():
                model(x)
            model(x)
            torch.autograd.grad(model(x).sum(), list(model.parameters()))
            train(model, opt, [(x, y)])
    assert_same(*trainings)


def test_several_passes_make_an_ordinary_step() -> None:
    trainings = warm("residual", **NONLINEAR)
    for model, opt in trainings:
        opt.zero_grad()
        for x, y in data("residual", 2):
            cross_entropy(model(x), y).backward()
        opt.step()
        found = opt._replays.reason
        train(model, opt, data("residual", 3))
    assert found == "graphed=False"
    assert_same(*trainings)


def test_a_parameter_without_a_gradient_now_and_then() -> None:
    trainings = warm("residual")
    for model, opt in trainings:
        for i, (x, y) in enumerate(data("residual", 14)):
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            if i % 2:
                model.last.bias.grad = None  # type: ignore[union-attr]
            opt.step()
    assert_same(*trainings)


def test_modes_and_buffers_of_the_model() -> None:
    trainings = warm("residual", **NONLINEAR)
    for model, opt in trainings:
        for i, batch in enumerate(data("residual", 12)):
            model.train(i % 4 != 0)
            train(model, opt, [batch])
    assert_same(*trainings)


def test_clipping_is_followed() -> None:
    trainings = warm("residual", **NONLINEAR)
    for model, opt in trainings:
        for x, y in data("residual", 6):
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
    assert trainings[0][1]._replays.reason is None
    assert_same(*trainings)


class Own(nn.Linear):
    """Decides in Python what it does."""

    turn = 0

    def forward(self, x: Tensor) -> Tensor:
        self.turn += 1
        return super().forward(x) * (1.0 if self.turn % 4 < 2 else 0.5)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.dropout(torch.tanh(self.first(x)), 0.5, self.training))
        return out


def test_layers_that_may_decide_in_python_are_not_replayed() -> None:
    found = train(*tuned(nn.Sequential(Own(5, 4), nn.Tanh(), nn.Linear(4, 3))), batches(9))
    assert set(found) == {"'0' is a Own, and may decide in Python what it does"}


def test_random_numbers_are_not_replayed() -> None:
    found = train(*tuned(Drops()), batches(9))
    assert found[-1] == "the model draws random numbers, and feedback='nonlinear' runs it again"


def test_hooks_of_others_are_not_replayed() -> None:
    model, opt = tuned(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    model[1].register_forward_hook(lambda *_: None)  # type: ignore[index]
    assert train(model, opt, batches(9))[-1] == "others have hooks on the model"


@pytest.mark.filterwarnings("error")
def test_what_does_not_last_is_not_said() -> None:
    model, opt = make("residual", **NONLINEAR, graphed=True)
    assert train(model, opt, data("residual", 13))[-1] is None


def test_what_is_asked_for_in_vain_is_said_once() -> None:
    model, opt = tuned(Drops(), graphed=True)
    with pytest.warns(UserWarning, match="graphed=True: the model draws random numbers") as caught:
        train(model, opt, batches(20))
    assert len([each for each in caught if "draws" in str(each.message)]) == 1


def test_steps_of_many_kinds_do_not_fill_the_memory() -> None:
    model, opt = make("chain", **NONLINEAR)
    for _ in range(8):
        for size in range(3, 13):
            train(model, opt, batches(1, size=size))
    assert opt._replays.captures == replays._MOST
    assert opt._replays.reason == "there are steps of too many kinds"
    assert train(model, opt, batches(1, size=3)) == [None]
    for size in range(13, 13 + 10 * replays._MOST):
        train(model, opt, batches(1, size=size))
    assert len(opt._replays._kinds) <= 9 * replays._MOST
    assert train(model, opt, batches(1, size=3)) == [None]


@pytest.mark.parametrize("message", ["no such luck", ""])
def test_a_capture_that_fails_is_an_ordinary_step(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = make("residual", **NONLINEAR), make("residual", **NONLINEAR, graphed=False)
    settled = Problem.settle

    def settle(self: Problem) -> None:
        if whole_step.underway():
            raise RuntimeError(message)
        settled(self)

    monkeypatch.setattr(Problem, "settle", settle)
    found = train(*ours, data("residual", 12))
    train(*theirs, data("residual", 12))
    assert found[-1] == f"the capture failed (RuntimeError: {message})"
    assert_same(ours, theirs)


class Switch(nn.Module):
    """Its layers run in one order or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 4)
        self.first = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b) if self.first else (self.b, self.a):
            x = torch.tanh(layer(x))
        out: Tensor = self.last(x)
        return out


@pytest.mark.parametrize("game", [{"game": "noncooperative"}, {"bellman": "paper"}, NONLINEAR], ids=str)
def test_layers_in_another_order(game: dict[str, Any]) -> None:
    trainings = []
    for graphed in (None, False):
        torch.manual_seed(0)
        model = Switch().double()
        opt = OCNOpt(model.parameters(), 0.05, model=model, curvature="identity", graphed=graphed, **game)
        for i, batch in enumerate(batches(40)):
            model.first = i % 4 != 3
            train(model, opt, [batch])
        trainings.append((model, opt))
    assert trainings[0][1]._replays.captures
    assert_same(*trainings)

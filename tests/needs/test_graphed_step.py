"""graphed_step where there is no CUDA device: eager steps with a reason, learning rates, what a graph has frozen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import SOME_GAMES, assert_identical, backward, batches, mlp, name_of, state_of, train, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt, clockwork, graphed_step
from ocnopt.clockwork import Rates, changed_options, frozen
from ocnopt.curvature import Adaptive
from ocnopt.games import Alignment
from ocnopt.graphs import Inputs


def make(**options: Any) -> tuple[nn.Sequential, OCNOpt]:
    model = mlp()
    return model, OCNOpt(model.parameters(), model=model, **options)


# --- eager, with a reason ---


@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
@pytest.mark.filterwarnings("ignore:graphed_step")
def test_on_a_cpu_the_steps_are_those_of_the_loop(game: dict[str, Any]) -> None:
    (plain, theirs), (model, ours), data = make(**game), make(**game), batches(4)
    step = graphed_step(model, cross_entropy, ours, data[0])
    found = [step(x, y) for x, y in data]
    assert [loss.item() for loss in found] == train(plain, theirs, data)
    assert not any(loss.requires_grad for loss in found)
    assert_identical(values(model), values(plain))
    assert_identical(state_of(ours), state_of(theirs))


def test_the_reason_is_said_once() -> None:
    model, opt = make()
    with pytest.warns(UserWarning, match="graphed_step: the parameters are on cpu"):
        step = graphed_step(model, cross_entropy, opt, batches()[0])
    for x, y in batches(3):
        step(x, y)
    assert "on cpu" in str(step.reason)
    assert step.captures == 0


@pytest.mark.filterwarnings("ignore:graphed_step")
def test_several_inputs_of_the_model() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(5, 3, dtype=torch.float64)

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return self.body(x) + shift

    (x, y), shift, found = batches()[0], torch.ones(3, dtype=torch.float64), []
    for given in ((x, shift), {"x": x, "shift": shift}):
        torch.manual_seed(0)
        model = Sum()
        step = graphed_step(model, cross_entropy, OCNOpt(model.parameters()), (given, y))
        found.append(step(given, y).item())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", torch.tanh, "model must be a torch.nn.Module"),
        ("loss_fn", 3, "loss_fn must be a function"),
        ("opt", "adam", "opt must be a torch.optim.Optimizer, got str"),
        ("example_inputs", torch.zeros(3), "example_inputs must be a tuple .* got Tensor"),
        ("example_inputs", (), "example_inputs must be a tuple .* got an empty one"),
    ],
)
def test_arguments_of_the_wrong_kind(name: str, value: Any, message: str) -> None:
    model, opt = make()
    arguments = {"model": model, "loss_fn": cross_entropy, "opt": opt, "example_inputs": batches()[0]}
    with pytest.raises(TypeError, match=message):
        graphed_step(**{**arguments, name: value})


def test_an_optimizer_of_another_model() -> None:
    with pytest.raises(ValueError, match="opt holds none of the parameters of model"):
        graphed_step(mlp(), cross_entropy, make()[1], batches()[0])


@pytest.mark.filterwarnings("ignore:graphed_step")
@pytest.mark.parametrize(
    ("loss_fn", "what"), [(lambda out, y: out, r"shape \(6, 3\)"), (lambda out, y: 1.0, "float")], ids=["many", "none"]
)
def test_a_loss_that_is_none(loss_fn: Any, what: str) -> None:
    model, opt = make()
    before = values(model)
    step = graphed_step(model, loss_fn, opt, batches()[0])
    with pytest.raises(TypeError, match=f"loss_fn must return a tensor with one number, got .*{what}"):
        step(*batches()[0])
    assert_identical(values(model), before)


class Own(Adaptive):
    name = "own"


def test_what_a_graph_cannot_do_is_known_beforehand() -> None:
    assert clockwork.why_not(make()[1]) is None
    assert "none of OCNOpt's own" in str(clockwork.why_not(make(curvature=Own())[1]))
    for alignment in ("random", {"0": Alignment.adaptive()}):
        opt = make(feedback="nonlinear", alignment=alignment)[1]
        assert "chooses anew at each step" in str(clockwork.why_not(opt))
    hooked = make()[1]
    hooked.register_step_post_hook(lambda *_: None)
    assert "hooks around its step" in str(clockwork.why_not(hooked))
    params = mlp().parameters()
    assert "fused=True" in str(clockwork.why_not(torch.optim.SGD(params, 0.1)))
    assert "capturable=True" in str(clockwork.why_not(torch.optim.Adam(mlp().parameters())))


# --- learning rates ---


def test_learning_rates_become_tensors_and_stay_the_same_ones() -> None:
    model = mlp()
    opt = OCNOpt([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1:].parameters()}], lr=0.1)
    rates = Rates(opt)
    rates.adopt()
    first, second = (group["lr"] for group in opt.param_groups)
    assert (first.item(), second.item(), first.dtype) == (0.5, 0.1, torch.float64)
    opt.param_groups[0]["lr"] = 0.25  # a schedule by hand
    opt.param_groups[1]["lr"] = theirs = torch.tensor(0.2)
    rates.adopt()
    assert opt.param_groups[0]["lr"] is first
    assert first.item() == 0.25
    assert opt.param_groups[1]["lr"] is theirs


def test_optimizers_of_torch_get_rates_that_fused_ones_can_read() -> None:
    opt = torch.optim.SGD(mlp().parameters(), 0.1)  # of float64 parameters
    Rates(opt).adopt()
    assert opt.param_groups[0]["lr"].dtype == torch.float32


@pytest.mark.parametrize("first", ["schedule", "tensors"])
@pytest.mark.parametrize("kind", ["lambda", "one-cycle"])
def test_schedules_fill_the_tensors(kind: str, first: str) -> None:
    def schedule(opt: OCNOpt) -> Any:
        if kind == "lambda":
            return torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 1 / (1 + i))
        return torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=9, cycle_momentum=False)

    (plain, theirs), (model, ours), data = make(), make(), batches(5)
    mine = schedule(ours) if first == "schedule" else None
    Rates(ours).adopt()
    rate, schedules = ours.param_groups[0]["lr"], (schedule(theirs), mine or schedule(ours))
    for batch in data:
        train(plain, theirs, [batch])
        train(model, ours, [batch])
        for each in schedules:
            each.step()
        assert ours.param_groups[0]["lr"] is rate
        assert rate.item() == pytest.approx(theirs.param_groups[0]["lr"], rel=1e-12)
    torch.testing.assert_close(values(model), values(plain))


# --- what a graph has frozen ---


def test_changes_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    opt = OCNOpt(model.parameters(), model=model, feedback="nonlinear")
    Rates(opt).adopt()
    train(model, opt, batches(2))
    modules = list(model.modules())
    look = lambda: frozen(opt, modules, [])  # noqa: E731
    before = look()
    opt.param_groups[0]["lr"].fill_(0.7)
    train(model, opt, batches(1))
    assert look() == before
    changes: dict[str, Any] = {
        "option": lambda: opt.param_groups[0].update(weight_decay=0.1),
        "mode": lambda: model[1].eval(),
        "state": lambda: opt.load_state_dict(opt.state_dict()),
        "parameter": lambda: setattr(model[0].weight, "data", model[0].weight.data.clone()),
        "frozen": lambda: model[0].weight.requires_grad_(False),
        "buffer": lambda: setattr(model[1], "running_mean", torch.zeros(4).double()),
        "module": lambda: setattr(model, "0", nn.Linear(5, 4)),
        "precision": lambda: torch.set_float32_matmul_precision("high"),
    }
    precision = torch.get_float32_matmul_precision()
    try:
        for name, change in changes.items():
            before = look()
            change()
            after = look()
            assert after != before, name
            assert changed_options(before, after) == (
                ["'weight_decay' of parameter group 0"] if name == "option" else []
            )
    finally:
        torch.set_float32_matmul_precision(precision)


def test_gradients_of_parameters_that_another_optimizer_has() -> None:
    model = mlp()
    opt = OCNOpt(model[0].parameters())
    others = list(model[1:].parameters())
    before = frozen(opt, [], others)
    backward(model, *batches()[0])
    assert frozen(opt, [], others) != before  # they are going to be added to


def test_inputs_of_another_kind() -> None:
    x, y = batches()[0]
    inputs = Inputs((x, {"y": y, "scale": 2}))
    assert inputs.why_not((torch.zeros_like(x), {"y": y, "scale": 2})) is None
    shorter = str(inputs.why_not((x[:3], {"y": y, "scale": 2})))
    assert shorter == "input 0 is (3, 5) float64 on cpu, the example (6, 5) float64 on cpu"
    assert "float32" in str(inputs.why_not((x.float(), {"y": y, "scale": 2})))
    assert "input 2 is 3, the example 2" in str(inputs.why_not((x, {"y": y, "scale": 3})))
    assert "not made up as the example" in str(inputs.why_not((x, y)))
    assert "with a gradient" in str(inputs.why_not((x.requires_grad_(), {"y": y, "scale": 2})))
    assert "requires a gradient" in str(Inputs((x, y)).why_never())


def test_inputs_are_copied_into_the_same_buffers() -> None:
    (x, y), (x2, y2) = batches(2)
    inputs = Inputs((x, y))
    first, second = inputs.buffers(), inputs.buffers()
    inputs.fill((x2, y2))
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert_identical(list(first), [x2, y2])
    assert first[0] is not x

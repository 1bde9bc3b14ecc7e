"""graphed_step where there is no CUDA device: eager steps with a reason, and the Python side of captured ones."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from tests.toys import SOME_GAMES, assert_identical, backward, batches, mlp, name_of, state_of, train, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt, clockwork, graphed_step, graphs, multi, whole_step
from ocnopt.clockwork import Clockwork, Rates, changed_options, frozen
from ocnopt.curvature import Adaptive
from ocnopt.games import Alignment
from ocnopt.graphs import Inputs
from ocnopt.rng import RNGState


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


# --- in place, so that a graph goes on with it ---


def test_new_eigenbases_take_the_places_of_the_old_ones() -> None:
    model, opt = make(curvature="kronecker", refresh_every=2)
    train(model, opt, batches(1))
    basis = opt.state[model[0][0].weight]["input_basis"]
    before, kept = frozen(opt, [], []), basis.clone()
    train(model, opt, batches(4))
    assert frozen(opt, [], []) == before
    assert not torch.equal(basis, kept)


def test_skipped_steps_are_counted_in_place() -> None:
    model, opt = make()
    train(model, opt, batches(1))
    total, old = opt._skips.total, opt.diagnostics
    (x, y), *_ = batches(1)
    train(model, opt, [(x * torch.nan, y)])
    assert opt._skips.total is total
    with pytest.warns(UserWarning, match="skipped"):
        assert opt.diagnostics.skipped_steps == 1
    assert old.skipped_steps == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_in_few_launches(dtype: torch.dtype) -> None:
    found = [torch.randn(shape, dtype=dtype) for shape in ((1,), (32, 32), (1025,), (3, 5, 700), (0, 4), ())]
    torch.testing.assert_close(multi.sums(found), torch.stack([t.sum() for t in found]), rtol=1e-4, atol=1e-4)


def test_generators_of_cuda_are_left_alone_in_a_capture() -> None:
    with whole_step.captured():
        assert list(RNGState.capture(["cuda"]).states) == [torch.device("cpu")]
    assert not whole_step.underway()


def test_a_hook_of_somebody_else_may_change_gradients_in_a_capture() -> None:
    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad *= 0.5

    scales = []
    for clip in (False, True):
        model, opt = make(feedback="nonlinear")
        if clip:
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(halve)
        with whole_step.captured():
            backward(model, *batches()[0])
        assert opt._tape is not None
        scales.append(opt._tape._scaling.factor(opt._talking_to(None)))
    assert scales[0] is None
    assert scales[1] is not None
    torch.testing.assert_close(scales[1], torch.tensor(0.5, dtype=torch.float64))


# --- the Python side of captured steps: here a capture runs what it captures, and a replay does nothing ---


class Nothing:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clockwork, "why_never", lambda model, opt: None)
    monkeypatch.setattr(graphs, "_mend", lambda device: None)
    for name in ("Stream", "CUDAGraph", "current_stream", "set_stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, Nothing)
    for name in ("stream", "device", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)


def reasons(step: Any, count: int) -> list[str | None]:
    found = []
    for x, y in batches(count):
        step(x, y)
        found.append(step.reason)
    return found


WARM = "the first steps warm up"


@pytest.mark.usefixtures("pretended")
def test_counters_go_on_over_replays() -> None:
    model, opt = make(curvature="kronecker", refresh_every=100)
    step = graphed_step(model, cross_entropy, opt, batches()[0])
    assert reasons(step, 9) == ["eigenbases are renewed", WARM, WARM, *[None] * 6]
    assert step.captures == 1
    assert opt._count == 9
    assert opt.state[model[0][0].weight]["since_refresh"] == 8
    assert opt._aligner._steps == 9


@pytest.mark.usefixtures("pretended")
def test_refreshes_are_eager() -> None:
    model, opt = make(curvature="kronecker", refresh_every=6)
    step = graphed_step(model, cross_entropy, opt, batches()[0])
    assert reasons(step, 7)[3:] == [None, None, None, "eigenbases are renewed"]


@pytest.mark.usefixtures("pretended")
def test_steps_that_look_at_layers_and_steps_that_do_not() -> None:
    model, opt = make(curvature="kronecker", refresh_every=100, factor_every=2)
    train(model, opt, batches(1))
    for layer in model.modules():
        if isinstance(layer, nn.Linear):  # long ago: the first ones follow each other quickly
            opt.state[layer.weight]["refreshed_at"] = 1000
    step = graphed_step(model, cross_entropy, opt, batches()[0])
    assert reasons(step, 8) == [*[WARM] * 4, *[None] * 4]
    assert step.captures == 2


@pytest.mark.usefixtures("pretended")
def test_the_data_flow_is_verified_as_often_as_it_would_be() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(5, 5).double() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.c(x + self.b(x.tanh()))[:, :3]

    model = Skip()
    opt = OCNOpt(model.parameters(), model=model, feedback="nonlinear")
    step = graphed_step(model, cross_entropy, opt, batches()[0])
    found = reasons(step, 12)
    flow = clockwork.flow_of(opt)
    assert flow is not None
    assert flow.uses == 12
    assert found[8:] == [None, "the data flow is verified", None, None]


@pytest.mark.usefixtures("pretended")
def test_a_changed_option_is_said_and_captured_anew() -> None:
    model, opt = make()
    step = graphed_step(model, cross_entropy, opt, batches()[0])
    assert reasons(step, 4)[-1] is None
    opt.param_groups[0]["weight_decay"] = 0.1
    with pytest.warns(UserWarning, match="'weight_decay' of parameter group 0 changed: new graphs are captured"):
        assert reasons(step, 3) == [WARM, WARM, None]
    opt.param_groups[0]["curvature"] = Own()
    with pytest.warns(UserWarning, match="none of OCNOpt's own"):
        step(*batches()[0])
    opt.param_groups[0]["curvature"] = "adaptive"
    with pytest.warns(UserWarning, match="'curvature' of parameter group 0 changed"):
        assert reasons(step, 3) == [WARM, WARM, None]
    assert step.captures == 3


@pytest.mark.usefixtures("pretended")
def test_other_shapes_are_eager_and_the_graph_stays() -> None:
    model, opt = make()
    step = graphed_step(model, cross_entropy, opt, batches()[0])
    reasons(step, 4)
    with pytest.warns(UserWarning, match=r"input 0 is \(2, 5\)"):
        step(*batches(1, size=2)[0])
    assert reasons(step, 2) == [None, None]
    assert step.captures == 1


@pytest.mark.usefixtures("pretended")
def test_a_model_that_draws_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter(range(1000))
    monkeypatch.setattr(RNGState, "same_as", lambda self, other: next(draws) < 0)  # as those of the device
    model, opt = make(feedback="nonlinear")
    step = graphed_step(model, cross_entropy, opt, batches()[0])
    with pytest.warns(UserWarning, match="draws random numbers, and feedback='nonlinear' runs it again"):
        reasons(step, 4)
    model, opt = make(rank=3)  # nothing is drawn again
    assert reasons(graphed_step(model, cross_entropy, opt, batches()[0]), 4)[-1] is None


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    "draw", [random.random, numpy.random.rand, lambda: torch.rand(1)], ids=["python", "numpy", "cpu"]
)
def test_random_numbers_of_the_host(draw: Any) -> None:
    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(out, y) * float(draw())

    model, opt = make()
    step = graphed_step(model, loss_fn, opt, batches()[0])
    with pytest.warns(UserWarning, match="random numbers are drawn on the host"):
        assert step.captures == len(set(reasons(step, 5))) - 2 == 0


@pytest.mark.usefixtures("pretended")
def test_a_step_that_waits_for_the_device_is_never_captured() -> None:
    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)  # as torch says it
        warnings.warn("something else", stacklevel=1)
        return cross_entropy(out, y)

    model, opt = make()
    step = graphed_step(model, loss_fn, opt, batches()[0])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = reasons(step, 5)
    assert found[:3] == [WARM] * 3
    assert "waits for the device (test_graphed_step.py, line" in str(found[3])
    assert sum("graphed_step: the step waits" in str(each.message) for each in said) == 1
    assert sum("something else" in str(each.message) for each in said) == 5
    assert step.captures == 0


@pytest.mark.usefixtures("pretended")
def test_a_capture_that_fails_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    game = {"curvature": "kronecker", "feedback": "nonlinear"}
    (plain, theirs), (model, ours), data = make(**game), make(**game), batches(6)

    class Broken(nullcontext[None]):
        """The step was written down, and nothing of it has run: its numbers are put back."""

        def __enter__(self) -> None:
            self.kept = [t.clone() for t in self.tensors()]

        def __exit__(self, *_: Any) -> None:
            for t, value in zip(self.tensors(), self.kept, strict=True):
                t.copy_(value)
            raise RuntimeError("no such luck")

        @torch.no_grad()
        def tensors(self) -> list[Tensor]:
            state = [v for own in ours.state.values() for v in own.values() if isinstance(v, Tensor)]
            return [*(p.data for p in model.parameters()), *{id(t): t for t in state}.values()]

    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: Broken())
    step = graphed_step(model, cross_entropy, ours, data[0])
    with pytest.warns(UserWarning, match=r"the capture failed \(RuntimeError: no such luck\)"):
        found = [step(x, y).item() for x, y in data]
    assert found == pytest.approx(train(plain, theirs, data), rel=1e-9)
    torch.testing.assert_close(state_of(ours), state_of(theirs))
    assert (ours._count, ours._aligner._steps) == (6, 6)


def test_reports_are_those_of_the_last_replay() -> None:
    model, opt = make()
    train(model, opt, batches(1))
    wheels = Clockwork(opt, None)
    train(model, opt, batches(1))
    assert wheels.stop() is None
    first = opt.diagnostics.layers
    assert opt.diagnostics.kernels is not None
    for part in opt.diagnostics.kernels.parts:  # as a replay does
        part.K.mul_(2)
    wheels.tick()
    assert [row.trace for row in opt.diagnostics.layers] == pytest.approx([2 * row.trace for row in first])

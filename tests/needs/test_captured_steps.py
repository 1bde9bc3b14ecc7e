"""The Python side of captured steps: counters, schedules of eager steps, and what must be changed in place."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from tests.toys import assert_identical, backward, batches, mlp, state_of, train, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt, clockwork, graphed_step, multi, recording, whole_step
from ocnopt.clockwork import Clockwork, frozen
from ocnopt.curvature import Adaptive
from ocnopt.rng import RNGState


def make(**options: Any) -> tuple[nn.Sequential, OCNOpt]:
    model = mlp()
    return model, OCNOpt(model.parameters(), model=model, **options)


class Own(Adaptive):
    name = "own"


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
        scales.append(opt._tape.scaling.factor(opt._talking_to(None)))
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
    monkeypatch.setattr(recording, "_mend", lambda device: None)
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
def test_refreshes_come_between_replays() -> None:
    """Of the layer whose turn it is, and of no other."""
    model, opt = make(curvature="kronecker", refresh_every=6)
    step = graphed_step(model, cross_entropy, opt, batches()[0])
    assert reasons(step, 4)[3:] == [None]
    renewed = []
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    for x, y in batches(9):
        before = [opt.state[w]["refreshed_at"] for w in weights]
        for w in weights:  # a replay that does nothing counts nothing
            opt.state[w]["statistics"] += 1
        step(x, y)
        assert step.reason is None
        renewed.append([opt.state[w]["refreshed_at"] != was for w, was in zip(weights, before, strict=True)])
    assert max(map(sum, renewed)) == 1
    assert all(any(each) for each in zip(*renewed, strict=True))


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
    assert "waits for the device (test_captured_steps.py, line" in str(found[3])
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


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("bad", [(), (5,), (7, 8)])
def test_a_refresh_beforehand_is_that_of_the_step(rank: int, bad: tuple[int, ...]) -> None:
    """Whoever asks before it, and after it, is told of the same looks."""
    (model, opt), (other, theirs) = (
        make(curvature="kronecker", refresh_every=20, factor_every=5, rank=rank) for _ in range(2)
    )
    for i, (x, y) in enumerate(batches(24)):
        batch = (x * torch.nan, y) if i in bad else (x, y)
        train(model, opt, [batch])
        with torch.no_grad():
            clockwork.catch_up(theirs)
        train(other, theirs, [batch])
        assert_identical(values(model), values(other))
        assert_identical(state_of(opt), state_of(theirs))


@pytest.mark.parametrize("rank", [1, 3])
def test_looks_where_they_are_rare(rank: int) -> None:
    model, opt = make(curvature="kronecker", refresh_every=20, factor_every=5, rank=rank)
    factor, looks = None, []
    for step, batch in enumerate(batches(18), start=1):
        train(model, opt, [batch])
        now = opt.state[model[0][0].weight]["input_factor"]
        if factor is None or not torch.equal(now, factor):
            looks.append(step)
        factor = now.clone()
    assert looks == [1, 2, 3, 4, 6, 9, 13, 18]

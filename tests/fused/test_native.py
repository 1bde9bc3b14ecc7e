"""The kernels for a CPU do what the plain operations do."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.fused.checks import (  # noqa: F401
    test_a_bad_step_leaves_no_trace,
    test_a_long_memory,
    test_a_loss_that_is_a_sum,
    test_a_second_moment_that_starts_late,
    test_a_second_pass_that_fails_leaves_no_trace,
    test_a_step,
    test_gradients_in_another_order,
    test_gradients_that_are_hardly_there,
    test_options,
    test_parameters_that_act_apart,
    test_rates_by_group_and_on_the_device,
    test_state_of_more_digits,
    test_the_first_step,
    test_what_cannot_be_had_is_said,
)
from tests.fused.checks_groups import (  # noqa: F401
    test_a_bad_group_leaves_no_trace,
    test_a_step_by_group,
    test_gradients_that_are_no_sum_of_groups,
    test_groups_of_a_convolution_with_channels_last,
    test_options_by_group,
)
from tests.fused.networks import DECAYS, MOMENTA, convolutions, images, network, one_pass, trained
from tests.toys import assert_identical, values
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ocnopt import OCNOpt
from ocnopt.fused.native import binding
from ocnopt.fused.native.actor import NativeActor
from ocnopt.gram import Gram

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the networks are on the GPU"),
    pytest.mark.skipif(isinstance(binding.library(), str), reason=str(binding.library())),
]


@pytest.mark.parametrize("momentum", ["none", "average", "nesterov"])
@pytest.mark.parametrize("decay", list(DECAYS))
@pytest.mark.parametrize(("curvature", "feedback"), [("adaptive", "linear"), ("identity", "nonlinear")])
def test_parts_of_gradients(acted: list[NativeActor], curvature: str, feedback: str, momentum: str, decay: str) -> None:
    """Of taps that see padding alone there are none."""
    options = {"curvature": curvature, "feedback": feedback, "rank": 3, **MOMENTA[momentum], **DECAYS[decay]}
    model = convolutions()
    plain = trained(copy.deepcopy(model), images(), fused=False, **options)
    ours = trained(model, images(), fused=True, **options)
    kinds = {tuple(row[:2]) for actor in acted for row in actor.lines.table.tolist()}
    assert {(1, 1), (9, 4), (9, 1)} <= kinds
    torch.testing.assert_close(ours, plain, rtol=5e-5, atol=2e-6)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize(("kernel", "side"), [(3, 1), (5, 2), (3, 2)])
def test_parts_of_gradients_after_earlier_passes(kernel: int, side: int, rank: int) -> None:
    """Columns of these are whole."""
    found = []
    for fused in (False, True):
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 5, kernel, padding=kernel // 2), nn.Tanh(), nn.Flatten(), nn.Linear(5 * side**2, 2)]
        model = nn.Sequential(*layers)
        opt = OCNOpt(model.parameters(), model=model, rank=rank, accumulate=2, lr=0.1, fused=fused)
        for _ in range(2):
            opt.zero_grad()
            for seed in range(2):
                model((1 + seed) * images(6, side)).square().mean().backward()
            opt.step()
        found.append([values(model), opt.diagnostics.kernels.K])
    torch.testing.assert_close(found[1], found[0], rtol=5e-5, atol=2e-6)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("curvature", ["identity", "adaptive"])
def test_gradients_that_somebody_has_written_to(curvature: str, outside: bool, acted: list[NativeActor]) -> None:
    """Where calls leave zeros, or not: there columns of parts go on."""
    found = []
    for fused in (False, True):
        model = convolutions()
        opt = OCNOpt(model.parameters(), model=model, rank=3, fused=fused, curvature=curvature, eps=1e-2, lr=0.1)
        for _ in range(2):
            opt.zero_grad()
            model(images()).square().mean().backward()
            for p in model.parameters():
                p.grad.add_(0.01 * p.detach() if outside else 0.1 * p.grad.abs())
            opt.step()
        found.append([values(model), opt.diagnostics.w])
    assert ([9, 1] in acted[-1].lines.table[:, :2].tolist()) != outside
    torch.testing.assert_close(found[1], found[0], rtol=5e-5, atol=2e-6)


@pytest.mark.parametrize("rank", range(2, 9))
def test_ranks(rank: int) -> None:
    options = {"rank": rank, "feedback": "nonlinear", "weight_decay": 0.1, "decoupled_weight_decay": True}
    plain = trained(convolutions(), images(9), fused=False, **options)
    torch.testing.assert_close(trained(convolutions(), images(9), **options), plain, rtol=5e-5, atol=2e-6)


@pytest.mark.parametrize("options", [{"rank": 4}, {"rank": 4, "curvature": "identity"}, {}], ids=str)
def test_any_number_of_threads(options: dict[str, Any], acted: list[NativeActor]) -> None:
    threads, runs = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(1)
            model, opt = convolutions(), None
            opt = OCNOpt(model.parameters(), model=model, lr=0.05, **options)
            model(images()).square().mean().backward()
            torch.set_num_threads(count)
            opt.step()
            runs.append(values(model))
            assert acted[-1].described.threads == count
    finally:
        torch.set_num_threads(threads)
    assert_identical(runs[1], runs[0])
    assert_identical(runs[2], runs[0])


def test_parts_of_weights_with_channels_last(acted: list[NativeActor]) -> None:
    """All of a gradient is laid out as they are."""
    model = convolutions().to(memory_format=torch.channels_last)
    plain = trained(copy.deepcopy(model), images(), fused=False, rank=3)
    torch.testing.assert_close(trained(model, images(), fused=True, rank=3), plain, rtol=5e-5, atol=2e-6)
    assert {tuple(row[:2]) for row in acted[-1].lines.table.tolist()} == {(1, 1)}


def test_parts_of_long_lines(acted: list[NativeActor]) -> None:
    """All of a gradient is laid out, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 601, padding=300), nn.Tanh(), nn.Flatten(), nn.Linear(9, 1))
    x = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(1))
    plain = trained(copy.deepcopy(model), x, fused=False, rank=3)
    torch.testing.assert_close(trained(model, x, fused=True, rank=3), plain, rtol=5e-5, atol=2e-6)
    assert {tuple(row[:2]) for row in acted[-1].lines.table.tolist()} == {(1, 1)}


def test_whose_gradients_are_better_not_formed(acted: list[NativeActor]) -> None:
    """Layers that go by products of their inputs do so beside those that act by kernels, unless these are asked for."""
    for fused in (None, True):
        acted.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 70, bias=False), nn.Tanh(), nn.Linear(70, 70), nn.LayerNorm(70))
        opt = OCNOpt(model.parameters(), model=model, rank=4, curvature="identity", fused=fused)
        one_pass(model, 0)
        opt.step()
        kinds = [shelf.kind for shelf in opt._roster.shelves._shelves]
        assert (Gram in kinds) == (fused is None)
        assert acted


@pytest.mark.parametrize("options", [{}, {"feedback": "nonlinear"}, {"rank": 2}], ids=str)
def test_autograd_is_told(options: dict[str, Any], acted: list[NativeActor]) -> None:
    """As torch's optimizers do by operations that it sees."""
    model = network()
    opt = OCNOpt(model.parameters(), model=model, **options)
    loss = model(torch.randn(4, 5)).square().mean()
    loss.backward(retain_graph=True)
    opt.step()
    assert acted
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_few_digits(dtype: torch.dtype) -> None:
    model = network(dtype)
    opt = OCNOpt(model.parameters(), fused=True)
    one_pass(model, 0)
    with pytest.raises(RuntimeError, match=f"^fused=True cannot be had for .* on a CPU parameters of {dtype} are not"):
        opt.step()


def test_gradients_of_few_digits() -> None:
    """Of parameters that have more."""
    found = []
    for fused in (None, False):
        model = network()
        for p in model.parameters():
            p.grad_dtype = None
            p.grad = torch.linspace(1, 2, p.numel()).view_as(p).to(torch.bfloat16)
        OCNOpt(model.parameters(), fused=fused).step()
        found.append(values(model))
    assert_identical(*found)


def test_tensors_that_hold_no_numbers() -> None:
    """They are an error, as in any step; nobody looks where they are not."""
    with FakeTensorMode():
        model = nn.Linear(5, 3)
        opt = OCNOpt(model.parameters(), fused=True)
        one_pass(model, 0)
        with pytest.raises(RuntimeError, match="are not laid out as the parameters are"):
            opt.step()


def test_parameters_with_something_between_their_numbers(acted: list[NativeActor]) -> None:
    found = []
    for fused in (None, False):
        base = torch.arange(24.0).view(4, 6)
        p = nn.Parameter(base[:, ::2])
        p.grad = torch.ones(4, 6)[:, ::2]
        OCNOpt([p], 0.1, curvature="identity", momentum=0.0, fused=fused).step()
        found.append(base)
    assert_identical(*found)
    assert not acted


def test_gradients_that_are_views_of_their_negative() -> None:
    found = []
    for fused in (None, False):
        model = network()
        for p in model.parameters():
            p.grad = torch._neg_view(torch.linspace(1, 2, p.numel()).view_as(p))
        OCNOpt(model.parameters(), fused=fused).step()
        found.append(values(model))
    assert_identical(*found)


def test_another_default_device(acted: list[NativeActor]) -> None:
    model, x = convolutions(), images()
    with torch.device("meta"):
        opt = OCNOpt(model.parameters(), model=model, rank=3)
        model(x).square().mean().backward()
        opt.step()
    assert acted


def test_blocks_of_whole_lines(acted: list[NativeActor]) -> None:
    """Of three numbers each, which no power of two is a multiple of."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 40, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(80, 1))
    x = torch.randn(6, 8, 1, 2, generator=torch.Generator().manual_seed(1))
    plain = trained(copy.deepcopy(model), x, fused=False, rank=3)
    torch.testing.assert_close(trained(model, x, rank=3), plain, rtol=5e-5, atol=2e-6)
    assert [9, 3] in acted[-1].lines.table[:, :2].tolist()


@pytest.mark.parametrize("rank", [1, 3])
def test_a_bad_gradient_leaves_no_trace(rank: int) -> None:
    """Of which the calls know nothing."""
    model = convolutions()
    opt = OCNOpt(model.parameters(), model=model, rank=rank)
    model(images()).square().mean().backward()
    model[4].weight.grad.view(-1)[-1] = torch.nan  # where columns have nothing, too
    before = values(model)
    opt.step()
    assert_identical(values(model), before)
    with pytest.warns(UserWarning, match="1 step"):
        assert opt.diagnostics.skipped_steps == 1


@pytest.mark.parametrize("rank", [1, 3])
def test_second_moments_that_are_no_numbers(rank: int) -> None:
    found = []
    for fused in (None, False):
        model = convolutions()
        opt = OCNOpt(model.parameters(), model=model, rank=rank, fused=fused)
        for i in range(2):
            model(images()).square().mean().backward()
            opt.step()
            if i == 0:
                opt.state[model[0].weight]["second_moment"][0] = torch.nan
        found.append([torch.isnan(p) for p in values(model)])
    assert any(p.any() for p in found[1])
    assert_identical(*found)


class Projected(nn.Module):
    """Its parameters are somewhere else after each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 300), nn.Linear(300, 1)

    def forward(self, x: Tensor) -> Tensor:
        for p in self.parameters():
            p.data = p.data.clamp(-0.02, 0.02)
        return self.two(torch.tanh(self.one(x)))


@pytest.mark.parametrize("options", [{}, {"rank": 3}, {"curvature": "identity"}], ids=str)
def test_parameters_that_are_somewhere_else_in_the_second_pass(options: dict[str, Any]) -> None:
    """Without momentum, which plain operations take off before that."""
    found = []
    for fused in (False, None):
        torch.manual_seed(0)
        model = Projected()
        opt = OCNOpt(
            model.parameters(), model=model, feedback="nonlinear", fused=fused, eps=1e-2, momentum=0.0, **options
        )
        for i in range(3):
            one_pass(model, i)
            opt.step()
        found.append(values(model))
    torch.testing.assert_close(found[1], found[0], rtol=2e-5, atol=2e-6)


def test_state_of_parameters_that_are_somewhere_else_in_the_second_pass() -> None:
    model = Projected()
    opt = OCNOpt(model.parameters(), model=model, feedback="nonlinear")
    for i in range(3):
        one_pass(model, i)
        before = [own["second_moment"].clone() for own in opt.state.values()]
        opt.step()
    assert all((own["second_moment"] != v).any() for own, v in zip(opt.state.values(), before, strict=True))


def test_parameters_that_are_laid_out_anew_in_the_second_pass() -> None:
    model = Projected()
    opt = OCNOpt(model.parameters(), model=model, feedback="nonlinear")
    one_pass(model, 0)
    model.forward = lambda x: (_turn(model.one.weight), Projected.forward(model, x))[1]
    before = values(model)
    with pytest.raises(RuntimeError, match=r"^'one.weight' was laid out anew while the model ran a second time"):
        opt.step()
    assert_identical([t.clamp(-0.02, 0.02) for t in before], [t.clamp(-0.02, 0.02) for t in values(model)])


def _turn(p: nn.Parameter) -> None:
    p.data = p.data.t().contiguous().t()


def test_parameters_that_are_laid_out_anew_in_their_place() -> None:
    found = []
    for fused in (None, False):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(3, 3))
        opt = OCNOpt([p], fused=fused)
        for _ in range(2):
            p.grad = torch.randn(3, 3)
            opt.step()
            p.data = p.data.t()
        found.append(p.detach())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("curvature", ["identity", "adaptive"])
def test_parameters_that_are_infinite(curvature: str, rank: int) -> None:
    """A bias before a softmax, say."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.bias[1] = -torch.inf
    opt = OCNOpt(model.parameters(), model=model, rank=rank, curvature=curvature, fused=True)
    for _ in range(2):
        opt.zero_grad()
        model(torch.randn(4, 3)).softmax(1)[:, 0].sum().add(model.weight.square().sum()).backward()
        opt.step()
    assert model.bias[1] == -torch.inf
    assert all(torch.isfinite(t).all() for own in opt.state.values() for t in own.values())


def test_gradients_that_take_no_memory() -> None:
    p = nn.Parameter(torch.ones(2))
    p.grad = torch._efficientzerotensor((2,))
    OCNOpt([p]).step()
    assert_identical(p, torch.ones(2))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nobody forks here")
def test_a_forked_process_makes_steps_of_few_numbers() -> None:
    """In which no other thread can be had."""
    code = """
import os, torch
from torch import Tensor, nn
from ocnopt import OCNOpt
torch.set_num_threads(2)
model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
opt = OCNOpt(model.parameters(), fused=True)
model(torch.randn(6, 4)).square().mean().backward()
opt.step()
child = os.fork()
opt.step()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

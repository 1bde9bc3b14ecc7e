"""The kernels for a CPU do what the plain operations do."""

from __future__ import annotations

import copy
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
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
from tests.fused.networks import DECAYS, MOMENTA, found, network, one_pass
from tests.toys import assert_identical, values
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ocnopt import OCNOpt
from ocnopt.fused.native import binding, build
from ocnopt.fused.native.actor import NativeActor
from ocnopt.gram import Gram

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the networks are on the GPU"),
    pytest.mark.skipif(isinstance(build.library(), str), reason=str(build.library())),
]


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> list[NativeActor]:
    """Who has acted by the kernels."""
    seen: list[NativeActor] = []
    real = NativeActor._act

    def noted(self: NativeActor, *args: Any, **options: Any) -> None:
        seen.append(self)
        real(self, *args, **options)

    monkeypatch.setattr(NativeActor, "_act", noted)
    return seen


def convolutions(bias: bool = True) -> nn.Sequential:
    """Of 4×4 pixels, then of 2×2 and of one, whose kernels see padding mostly."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 7, 3, stride=2, padding=1, bias=bias),
        nn.Tanh(),
        nn.Conv2d(7, 70, 3, stride=2, padding=1, bias=bias),
        nn.Tanh(),
        nn.Conv2d(70, 90, 3, padding=1, bias=bias),
        nn.Flatten(),
        nn.Linear(90, 2),
    ]
    return nn.Sequential(*layers)


def trained(model: nn.Module, x: torch.Tensor, steps: int = 3, **options: Any) -> list[Any]:
    opt = OCNOpt(model.parameters(), model=model, lr=0.05, eps=1e-2, **options)  # of small numbers last digits differ
    for i in range(steps):
        opt.zero_grad()
        model((1 + 0.1 * i) * x).square().mean().backward()
        opt.step()
    return found(model, opt)


def images(batch: int = 6, side: int = 4) -> torch.Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1))


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


# --- building them ---


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], str | None]]:
    """Build the kernels again, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    build.library.cache_clear()
    yield lambda: binding.why_not(torch.float32)
    build.library.cache_clear()


def kept(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "ocnopt" / "kernels").iterdir())


def test_they_are_built_once(anew: Callable[[], str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert anew() is None
    (library,) = kept(tmp_path)
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    build.library.cache_clear()
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: pytest.fail("built again"))
    assert anew() is None
    assert kept(tmp_path) == [library]


def test_for_another_processor_they_are_others(
    anew: Callable[[], str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose vectors are shorter. Homes are shared between machines."""
    assert anew() is None
    monkeypatch.setattr(build, "FLAGS", tuple(flag for flag in build.FLAGS if flag != "-march=native"))
    build.library.cache_clear()
    plain = trained(convolutions(), images(9), fused=False, rank=7, feedback="nonlinear")
    ours = trained(convolutions(), images(9), fused=True, rank=7, feedback="nonlinear")
    torch.testing.assert_close(ours, plain, rtol=5e-5, atol=2e-6)
    assert len(kept(tmp_path)) == 2


@pytest.mark.usefixtures("anew")
def test_where_nothing_can_be_kept(tmp_path: Path, acted: list[NativeActor]) -> None:
    (tmp_path / "cache").write_text("no folder")
    trained(convolutions(), images(), fused=True)
    assert acted


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("/nowhere/cc", "kernels for a CPU cannot be built: .*/nowhere/cc"),
        ("false", "false cannot build kernels for a CPU: it does not say why"),
        (f"{sys.executable} -c 1/0", "cannot build kernels for a CPU: Traceback"),
        ("true", "kernels for a CPU cannot be built: .*No such file"),
    ],
)
def test_a_compiler_that_does_not(compiler: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", compiler)
    _said(why)


@pytest.mark.usefixtures("anew")
def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    _said("there is no C compiler to build kernels for a CPU")


@pytest.mark.usefixtures("anew")
def test_another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.sys, "platform", "win32")
    _said("kernels for a CPU are built on Linux, not on 'win32'")


def _said(why: str) -> None:
    """Where they are asked for; elsewhere steps are made without a word."""
    with pytest.raises(RuntimeError, match=f"^fused=True cannot be had for '0.weight': .*{why}"):
        trained(convolutions(), images(), fused=True)
    assert_identical(trained(convolutions(), images()), trained(convolutions(), images(), fused=False))

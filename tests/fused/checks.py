"""Fused kernels do what the plain operations do. On a GPU, or in Triton's interpreter: see who imports this."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.fused.networks import (
    DECAYS,
    DEVICE,
    MOMENTA,
    assert_same_step,
    found,
    network,
    one_pass,
    pair,
)
from tests.toys import assert_identical, state_of, values
from torch import Tensor, nn

from ocnopt import OCNOpt
from ocnopt.fused import support


@pytest.mark.parametrize(
    ("feedback", "momentum", "decay"),
    [
        ("linear", "none", "coupled"),
        ("linear", "average", "none"),
        ("linear", "average", "decoupled"),
        ("linear", "heavy ball", "coupled"),
        ("linear", "nesterov", "decoupled"),
        ("nonlinear", "none", "none"),
        ("nonlinear", "average", "coupled"),
        ("nonlinear", "uncorrected", "decoupled"),
        ("nonlinear", "nesterov", "coupled"),
    ],
)
@pytest.mark.parametrize("curvature", ["identity", "adaptive"])
def test_a_step(curvature: str, feedback: str, momentum: str, decay: str) -> None:
    assert_same_step(curvature=curvature, feedback=feedback, **MOMENTA[momentum], **DECAYS[decay])


@pytest.mark.parametrize(
    "options",
    [
        {"feedback": "off"},
        {"feedback": "off", "curvature": "identity"},
        {"maximize": True},
        {"maximize": True, "feedback": "nonlinear"},
        {"players": 3, "weight_decay": 0.1},
        {"eps": 0.0},
        {"eps": 0.0, "bias_correction": False},
        {"decay": 0.0},
        {"clamp": False},
        {"clamp": False, "feedback": "nonlinear", "gauss_newton": 0.3},
        {"game": "noncooperative", "feedback": "nonlinear"},
        {"game": "noncooperative"},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    assert_same_step(**options)


@pytest.mark.parametrize("curvature", ["identity", "adaptive"])
def test_the_first_step(curvature: str) -> None:
    assert_same_step(steps=0, curvature=curvature)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_few_digits(dtype: torch.dtype) -> None:
    model, plain, ours, fused = pair(dtype=dtype, weight_decay=0.1, feedback="nonlinear")
    for net, opt in ((model, plain), (ours, fused)):
        one_pass(net, 7)
        opt.step()
    assert {t.dtype for own in state_of(fused) for t in own.values()} == {torch.float32}
    torch.testing.assert_close(values(ours), values(model), rtol=0.02, atol=1e-3)
    if DEVICE.type == "cuda" or dtype == torch.float16:  # the interpreter cuts bfloat16 off, a GPU rounds
        same = [(a == b).float().mean() for a, b in zip(values(ours), values(model), strict=True)]
        assert min(same) > 0.9  # but for a last digit here and there


def test_rates_by_group_and_on_the_device() -> None:
    models = [network(), network()]
    optimizers = []
    for model, fused in zip(models, (False, True), strict=True):
        first, *rest = model.parameters()
        groups = [{"params": [first], "lr": torch.tensor(0.02, device=DEVICE)}, {"params": rest, "weight_decay": 0.1}]
        optimizers.append(OCNOpt(groups, lr=0.05, fused=fused))
    for i in range(2):
        for model, opt in zip(models, optimizers, strict=True):
            one_pass(model, i)
            opt.step()
            opt.param_groups[0]["lr"].mul_(0.5)
    torch.testing.assert_close(values(models[1]), values(models[0]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"feedback": "nonlinear"}, {"weight_decay": 0.1, "feedback": "nonlinear"}])
def test_a_bad_step_leaves_no_trace(options: dict[str, Any]) -> None:
    _, _, model, opt = pair(**options)
    before = values(model), state_of(opt)
    one_pass(model, 3)
    for p in list(model.parameters())[:2]:
        p.grad[0] = torch.nan
    opt.step()
    assert_identical((values(model), state_of(opt)), before)
    with pytest.warns(UserWarning, match=r"1 step\(s\) skipped: the gradient of '0.weight'"):
        assert opt.diagnostics.skipped_steps == 1
    assert opt.diagnostics.kernels is not None
    assert opt.diagnostics.kernels.K.abs().max() == 0


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"curvature": "identity"}])
def test_a_second_pass_that_fails_leaves_no_trace(options: dict[str, Any]) -> None:
    _, _, model, opt = pair(feedback="nonlinear", **options)
    before = values(model), state_of(opt)
    one_pass(model, 3)
    model[3].forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        opt.step()
    assert_identical((values(model), state_of(opt)), before)


def test_a_second_moment_that_starts_late() -> None:
    model, plain, ours, fused = pair(curvature="identity")
    fused.param_groups[0]["fused"] = None
    for opt in (plain, fused):
        opt.param_groups[0]["curvature"] = "adaptive"
    for i in range(2):
        for net, opt in ((model, plain), (ours, fused)):
            one_pass(net, i)
            opt.step()
    torch.testing.assert_close(found(ours, fused), found(model, plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_long_memory(rank: int) -> None:
    """1 − 0.999 has fewer digits in float32 than its own."""
    model, plain, ours, fused = pair(decay=0.999, rank=rank)
    for net, opt in ((model, plain), (ours, fused)):
        one_pass(net, 7)
        opt.step()
    moments = [
        [opt.state[p]["second_moment"] for p in net.parameters()] for net, opt in ((ours, fused), (model, plain))
    ]
    torch.testing.assert_close(*moments, rtol=2e-6, atol=0)


def _turned(p: nn.Parameter) -> None:
    p.grad = p.grad.T.contiguous().T


def test_gradients_in_another_order() -> None:
    model, plain, ours, fused = pair()
    fused.param_groups[0]["fused"] = None
    for net, opt in ((model, plain), (ours, fused)):
        one_pass(net, 7)
        _turned(net[0].weight)
        opt.step()
    torch.testing.assert_close(values(ours), values(model), rtol=1e-6, atol=1e-8)
    fused.param_groups[0]["fused"] = True
    one_pass(ours, 8)
    _turned(ours[0].weight)
    with pytest.raises(
        RuntimeError, match=r"^fused=True cannot be had for '0.weight': gradients or state are not laid out"
    ):
        fused.step()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rank": "full"}, "rank must be 8 or less"),
        ({"bellman": "paper"}, "bellman must be 'consistent'"),
        ({"curvature": "kronecker"}, "curvature must be 'identity' or 'adaptive'"),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_said(options: dict[str, Any], why: str) -> None:
    model = network()
    opt = OCNOpt(model.parameters(), model=model, fused=True, **options)
    one_pass(model, 0, batch=17)
    with pytest.raises(RuntimeError, match=rf"^fused=True cannot be had for '\S+': {why}"):
        opt.step()
    wide = network(torch.float64)
    opt = OCNOpt(wide.parameters(), fused=True)
    one_pass(wide, 0)
    with pytest.raises(RuntimeError, match=r"parameters of torch.float64 are not supported"):
        opt.step()


@pytest.fixture
def repaired() -> Iterator[None]:
    yield
    support._broken = None


@pytest.mark.usefixtures("repaired")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, ours, fused = pair()
    fused.param_groups[0]["fused"] = None

    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            raise OSError("no compiler")

    monkeypatch.setattr(support.kernels(), "look", Broken())
    for net, opt in ((model, plain), (ours, fused)):
        one_pass(net, 7)
        if opt is fused:
            with pytest.warns(
                UserWarning, match=r"without fused kernels, and slower: Triton failed \(OSError: no compiler"
            ):
                opt.step()
        else:
            opt.step()
    assert_identical(values(ours), values(model))
    one_pass(ours, 8)
    fused.step()  # it has been said


def test_a_loss_that_is_a_sum() -> None:
    """Its gradient is one number, expanded."""
    found = []
    for fused in (False, True):
        model = network()
        opt = OCNOpt(model.parameters(), model=model, feedback="nonlinear", fused=fused, lr=0.01)
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        model(x).sum().backward()
        opt.step()
        found.append([values(model), opt.diagnostics.s, opt.diagnostics.predicted_change])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_gradients_that_are_hardly_there() -> None:
    """Squares of some are zero, and 0/0 is no step."""
    found = []
    for fused in (False, True):
        p = nn.Parameter(torch.zeros(6, device=DEVICE))
        opt = OCNOpt([p], lr=1.0, eps=0.0, fused=fused)
        for _ in range(2):
            p.grad = torch.tensor([0.0, 1e-25, 1e-22, 1e-20, 1e-19, 1e-3], device=DEVICE)
            opt.step()
        found.append(p.detach())
    assert 0 < -found[0][2] < 1e-2
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=0)


def test_state_of_more_digits() -> None:
    """From a checkpoint of a float64 network: it is not read as something else."""
    wide = network(torch.float64)
    its = OCNOpt(wide.parameters())
    one_pass(wide, 0)
    its.step()
    model = network()
    opt = OCNOpt(model.parameters())
    opt.load_state_dict(its.state_dict())
    opt.param_groups[0]["fused"] = True
    one_pass(model, 0)
    with pytest.raises(RuntimeError, match="gradients or state are not laid out as the parameters are"):
        opt.step()


def test_parameters_that_act_apart() -> None:
    """Two layers of one stage with others between them in the order of the parameters."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x))) + self.three(x)

    found = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = Apart().to(DEVICE)
        opt = OCNOpt(model.parameters(), model=model, feedback="nonlinear", fused=fused, curvature="identity", lr=0.3)
        for i in range(2):
            one_pass(model, i)
            opt.step()
        assert len(opt.game.stages) == 2
        found.append([values(model), opt.diagnostics.s])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)

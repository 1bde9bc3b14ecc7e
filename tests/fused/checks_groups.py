"""The same with gradients of groups of samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.fused.networks import (
    DECAYS,
    DEVICE,
    MOMENTA,
    assert_same_step,
    found,
    one_pass,
    pair,
)
from tests.layers.oracle import adapter_of
from tests.toys import assert_identical, state_of, values
from torch import nn

from ocnopt import OCNOpt
from ocnopt.fused import sums
from ocnopt.gradients import Explicit
from ocnopt.gram import Gram
from ocnopt.groups import Groups
from ocnopt.layers.base import Call


@pytest.mark.parametrize(
    ("feedback", "momentum", "decay"),
    [
        ("linear", "average", "none"),
        ("linear", "nesterov", "coupled"),
        ("nonlinear", "none", "none"),
        ("nonlinear", "average", "decoupled"),
        ("nonlinear", "heavy ball", "coupled"),
    ],
)
@pytest.mark.parametrize(("curvature", "rank"), [("identity", 3), ("adaptive", 3), ("adaptive", "full")])
def test_a_step_by_group(curvature: str, rank: int | str, feedback: str, momentum: str, decay: str) -> None:
    options = {"curvature": curvature, "rank": rank, "feedback": feedback}
    assert_same_step(**options, **MOMENTA[momentum], **DECAYS[decay])


@pytest.mark.parametrize(
    "options",
    [
        {"maximize": True},
        {"maximize": True, "feedback": "nonlinear"},
        {"players": 3, "weight_decay": 0.1},
        {"clamp": False, "feedback": "nonlinear", "gauss_newton": 0.3},
        {"game": "noncooperative", "feedback": "nonlinear"},
    ],
    ids=str,
)
def test_options_by_group(options: dict[str, Any]) -> None:
    assert_same_step(rank=3, **options)


@pytest.mark.parametrize("curvature", ["identity", "adaptive"])
def test_gradients_that_are_no_sum_of_groups(curvature: str) -> None:
    """What somebody has done to them is shared out."""
    model, plain, ours, fused = pair(rank=3, feedback="nonlinear", curvature=curvature)
    for net, opt in ((model, plain), (ours, fused)):
        one_pass(net, 7)
        for i, p in enumerate(net.parameters()):
            p.grad.mul_(0.5).add_(0.01 * i)
        opt.step()
    torch.testing.assert_close(found(ours, fused), found(model, plain), rtol=2e-5, atol=2e-6)


def test_a_bad_group_leaves_no_trace() -> None:
    """One that shows in no gradient, since somebody has repaired it."""
    _, _, model, opt = pair(rank=2)
    before = values(model), state_of(opt)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[3] = torch.inf
    model.zero_grad()
    model(x).square().mean().backward()
    for p in model.parameters():
        p.grad.nan_to_num_(0.0, 0.0, 0.0)
    opt.step()
    assert_identical((values(model), state_of(opt)), before)
    with pytest.warns(UserWarning, match=r"1 step\(s\) skipped"):
        assert opt.diagnostics.skipped_steps == 1


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("decoupled", [False, True])
def test_lines(rank: int, decoupled: bool) -> None:
    """Of the policy: in one kernel, or in operations of torch."""
    options = {"weight_decay": 0.1, "decoupled_weight_decay": decoupled, "players": 2}
    _, _, model, opt = pair(steps=1, rank=rank, feedback="nonlinear", **options)
    opt.param_groups[0]["lr"] = torch.tensor(0.02, device=DEVICE) if decoupled else 0.02
    one_pass(model, 5, batch=19)
    opt.step()
    policy = opt.diagnostics.policy
    J, b = policy.J.double(), policy.b.double()
    starts, slopes = (torch.stack(each).double() for each in policy._lines)
    assert policy.kernels.lines(policy.precision) is not None
    torch.testing.assert_close(slopes, torch.linalg.inv(J), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(starts, torch.linalg.solve(J, b), rtol=1e-4, atol=1e-6)


def test_lines_of_what_is_not_positive_definite() -> None:
    _, _, model, opt = pair(steps=1, rank=3, feedback="nonlinear")
    one_pass(model, 5)
    opt.step()
    kernels, precision = opt.diagnostics.policy.kernels, opt.diagnostics.policy.precision
    starts, slopes = kernels.lines(-1e6 * precision)
    assert starts.isnan().all()
    assert slopes.isnan().all()


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, Explicit), ({"fused": False}, Gram), ({"bellman": "paper"}, Gram), ({"curvature": "adaptive"}, Explicit)],
    ids=str,
)
@pytest.mark.parametrize("feedback", ["linear", "nonlinear"])
def test_group_gradients_are_formed_where_somebody_reads_them(
    options: dict[str, Any], kind: type, feedback: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 70, bias=False), nn.Tanh(), nn.Linear(70, 70, bias=False)).to(DEVICE)
    opt = OCNOpt(model.parameters(), model=model, rank=4, feedback=feedback, **{"curvature": "identity", **options})
    one_pass(model, 0)
    opt.step()
    assert {shelf.kind for shelf in opt._roster.shelves._shelves} == {kind}


def test_groups_of_a_convolution_with_channels_last() -> None:
    found = []
    for fused in (False, True):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 3 * 2, 2)
        model = nn.Sequential(*layers).to(DEVICE, memory_format=torch.channels_last)
        opt = OCNOpt(model.parameters(), model=model, rank=3, fused=fused, lr=0.1)
        x = torch.randn(6, 3, 5, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        for _ in range(2):
            opt.zero_grad()
            model(x.contiguous(memory_format=torch.channels_last)).square().mean().backward()
            opt.step()
        found.append([values(model), opt.diagnostics.w])
    assert not model[0].weight.is_contiguous()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_the_groups_of_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.BatchNorm2d(3).to(DEVICE)
    x, h = torch.randn(2, 8, 3, 4, 5, device=DEVICE).unbind()
    call, adapter, groups = Call(layer, (x,), {}, h), adapter_of(layer), Groups(8, 3)
    found = adapter.group_gradients(call, groups)
    monkeypatch.setattr(sums, "by_channel", lambda *_: None)
    torch.testing.assert_close(found, adapter.group_gradients(call, groups), rtol=1e-5, atol=1e-5)

"""The same for what layers are asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.fused.networks import DEVICE, without_kernels
from tests.toys import values
from torch import Tensor, nn
from torch.nn import functional as F

from ocnopt import OCNOpt
from ocnopt.fused import norms
from ocnopt.groups import Groups


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("shape", [(7, 5), (9, 40), (16, 3, 5, 7), (50, 6, 2, 2), (12, 3, 10, 10)])
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_gradients_of_batch_norms(rank: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    x, h, weight = 2 * randn(*shape) + 1, randn(*shape, seed=1), randn(shape[1], seed=2)
    groups, dims = Groups(len(x), rank), [0, *range(2, len(shape))]
    exact = x.double().requires_grad_()
    parameters = [weight.double().requires_grad_(), torch.zeros_like(weight).double().requires_grad_()]
    out = F.batch_norm(exact, None, None, *parameters, training=True)
    expected = torch.autograd.grad(out, [exact, *parameters], h.double())
    normal = F.batch_norm(x.double(), None, None, training=True)
    columns = [groups.sum(each, range(2, len(shape))) for each in (normal * h, h.double())]
    statistics = x.mean(dims), (x.var(dims, unbiased=False) + 1e-5).rsqrt()
    for tile in (norms._TILE, 2048):
        monkeypatch.setattr(norms, "_TILE", tile)
        found = norms.backward(x, h, *statistics, weight, groups)
        assert found is not None
        got = [found.into, found.weight, found.bias, *found.columns]
        torch.testing.assert_close([t.double() for t in got], [*expected, *columns], rtol=1e-5, atol=2e-5)
    assert not norms._has_kernel(rank, x.double(), h, weight)
    assert not norms._has_kernel(9, x, h, weight)
    assert norms.backward(x, h.clone().requires_grad_(), *statistics, weight, groups) is None


def network(**options: Any) -> nn.Sequential:
    """Without biases that a batch norm takes off again: their gradients are rounding errors."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4, **options), nn.ReLU(inplace=True)]
    layers += [nn.Conv2d(4, 6, 3, bias=False), nn.Tanh(), nn.Flatten(), nn.BatchNorm1d(24), nn.Linear(24, 3)]
    model = nn.Sequential(*layers).to(DEVICE)
    for p in model.parameters():
        with torch.no_grad():
            p.add_(0.1 * randn(*p.shape))
    return model


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    return model(randn(10, 2, 7, 7, seed=seed)).square().sum(1).tanh().mean()


@pytest.mark.parametrize("feedback", ["linear", "nonlinear"])
@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}, {"momentum": None}], ids=str)
def test_steps_of_a_network_with_batch_norms(options: dict[str, Any], feedback: str) -> None:
    """Gradients, groups, running statistics and parameters are those of plain operations."""
    plain = network(**options)
    ours = copy.deepcopy(plain)
    chosen = {"curvature": "identity", "rank": 4, "feedback": feedback, "graphed": False}
    theirs, mine = (OCNOpt(m.parameters(), 0.5, model=m, **chosen) for m in (plain, ours))
    theirs.param_groups[0]["fused"] = False
    for i in range(3):
        for model, opt, without in ((plain, theirs, True), (ours, mine, False)):
            opt.zero_grad()
            if without:
                with without_kernels():
                    loss_of(model, i).backward()
            else:
                loss_of(model, i).backward()
            assert opt._tape is not None
            split = {record.name for record in opt._tape.records if record.columns}
            others = {"1", "6"} if DEVICE.type == "cpu" or not without else set()
            assert split == {"0", "3", "7"} | others
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=2e-4 if DEVICE.type == "cuda" else 1e-6)
        with without_kernels():
            theirs.step()
        mine.step()
        torch.testing.assert_close(values(ours), values(plain), rtol=1e-3, atol=1e-4)


def test_batch_norms_that_are_differentiated_twice_or_in_part() -> None:
    found = []
    for rank in (1, 4):
        model = network()
        opt = OCNOpt(model.parameters(), 0.05, model=model, rank=rank, graphed=False)
        loss = loss_of(model)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum(g.square().sum() for g in grads)
        (loss + penalty).backward()
        found.append([p.grad for p in model.parameters()])
        x = randn(10, 2, 7, 7).requires_grad_()
        found[-1].append(torch.autograd.grad(model(x).square().mean(), x)[0])
        opt.zero_grad()
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3 if DEVICE.type == "cuda" else 1e-5)


def test_batch_norms_of_which_nothing_is_taken_over() -> None:
    """Of those without a bias, that are evaluated, whose input is laid out otherwise, and of many groups."""
    for change in ("bias", "eval", "order", *(["rank"] if DEVICE.type == "cuda" else [])):
        model = network()
        opt = OCNOpt(model.parameters(), 0.05, model=model, rank=9 if change == "rank" else 4, graphed=False)
        if change == "bias":
            model[1].bias.requires_grad_(False)
        elif change == "eval":
            model[1].eval()
        elif change == "order":
            model[0].to(memory_format=torch.channels_last)
        x = randn(10, 2, 7, 7)
        if change == "order":
            x = x.contiguous(memory_format=torch.channels_last)
        model(x).square().mean().backward()
        assert opt._tape is not None
        split = {record.name for record in opt._tape.records if record.columns}
        assert "1" not in split
        opt.step()


def test_a_batch_norm_of_single_numbers_is_refused_as_ever() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(DEVICE)
    opt = OCNOpt(model.parameters(), 0.05, model=model, rank=4, graphed=False)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(randn(1, 3))
    model(randn(8, 3)).square().mean().backward()
    opt.step()

"""Gradients of batch norms from the kernel for a CPU are those of autograd, group by group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layers.oracle import brute_force
from torch import Tensor, nn

from ocnopt import OCNOpt
from ocnopt.fused import norms
from ocnopt.fused.native import binding
from ocnopt.fused.native import norms as native
from ocnopt.groups import Groups
from ocnopt.layers import Call

pytestmark = pytest.mark.skipif(isinstance(binding.library(), str), reason=str(binding.library()))

LAYERS: dict[int, Any] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pytest.fixture(autouse=True)
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many groups the kernel was asked for, each time."""
    found: list[int] = []
    real = native.write

    def noted(given: Any, into: Any, groups: Groups) -> None:
        found.append(groups.rank)
        real(given, into, groups)

    monkeypatch.setattr(native, "write", noted)
    return found


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(shape: tuple[int, ...], groups: Groups) -> tuple[norms.Gradients | None, list[Tensor]]:
    """Those that are found, and those of autograd in double precision."""
    layer = LAYERS[len(shape)](shape[1]).double()
    layer.weight.data, layer.bias.data = random(shape[1:2], 0).double(), random(shape[1:2], 1).double()
    x, h, dims = 2 * random(shape, 2) + 1, random(shape, 3), [0, *range(2, len(shape))]
    exact = x.double().requires_grad_()
    expected = brute_force(Call(layer, (exact.detach(),), {}, h.double()), groups)
    into = torch.autograd.grad(layer(exact), exact, h.double())[0]
    scale = (exact.detach().var(dims, unbiased=False) + layer.eps).rsqrt()
    found = norms.backward(
        x, h, exact.detach().mean(dims).float(), scale.float(), layer.weight.detach().float(), groups
    )
    columns = torch.stack([expected["weight"], expected["bias"]])
    return found, [into, columns, expected["weight"].sum(0), expected["bias"].sum(0)]


def check(shape: tuple[int, ...], groups: Groups) -> None:
    found, expected = gradients(shape, groups)
    assert found is not None
    torch.testing.assert_close([t.double() for t in found], expected, rtol=1e-5, atol=2e-5)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(), (1,), (3,), (5, 7), (16, 16), (17, 16), (2, 3, 4), (9, 8, 8)]),
    st.sampled_from([1, 3, 40, 257, 300]),
    st.sampled_from([1, 2, 3, 8, 9]),
)
def test_they_are_those_of_autograd(space: tuple[int, ...], channels: int, rank: int) -> None:
    """Of less than a tile, of several and of parts of one; of groups that differ by a sample."""
    few = 3 if len(space) > 1 else channels
    check((9, min(few, channels), *space), Groups(9, rank))


def test_groups_of_given_sizes(written: list[int]) -> None:
    check((9, 70, 2, 2), Groups.of_sizes([2, 6, 1]))
    assert written == [3]


def test_inputs_far_from_zero() -> None:
    """The mean is taken off before anything is multiplied."""
    shape, dims = (64, 5, 4, 4), (0, 2, 3)
    x = 2 * random(shape, 0) + 1000
    h, mean, scale, weight = random(shape, 1) + x - 1000, x.mean(dims), x.var(dims).rsqrt(), random((5,), 2)
    found = norms.backward(x, h, mean, scale, weight, Groups(64, 8))
    normal, exact = (x.double() - mean[:, None, None]) * scale[:, None, None], h.double()
    into = exact - exact.mean(dims, True) - normal * (exact * normal).mean(dims, True)
    assert found is not None
    torch.testing.assert_close(found.into.double(), into * (scale * weight)[:, None, None], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.weight.double(), (exact * normal).sum(dims), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(32, 300), (32, 40, 8, 8), (8, 4, 40, 40)], ids=str)
def test_many_threads_add_up_in_the_same_order(shape: tuple[int, ...]) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(gradients(shape, Groups(shape[0], 4))[0])
    finally:
        torch.set_num_threads(before)
    assert found[0] is not None
    assert found[1] is not None
    assert all(map(torch.equal, *found))


def test_what_is_no_number_stays_in_its_channel_and_group() -> None:
    given = [random((8, 3, 4), 0), random((8, 3, 4), 1), *(torch.ones(3) for _ in range(3))]
    given[1][2, 1] = torch.nan
    found = norms.backward(*given, Groups(8, 4))
    assert found is not None
    assert found.columns.isnan().nonzero().tolist() == [[0, 1, 1], [1, 1, 1]]
    assert found.weight.isnan().tolist() == found.bias.isnan().tolist() == [False, True, False]
    assert found.into.isnan().any((0, 2)).tolist() == [False, True, False]


def test_another_device_by_default(written: list[int]) -> None:
    given = [random((8, 3, 4), 0), random((8, 3, 4), 1), *(torch.ones(3) for _ in range(3))]
    with torch.device("meta"):
        found = norms.backward(*given, Groups(8, 4))
    assert written == [4]
    assert found is not None
    torch.testing.assert_close(found.columns[1], given[1].reshape(4, 2, 3, 4).sum((1, 3)))


def test_what_is_left_to_torch(written: list[int]) -> None:
    """Other precisions, and tensors whose numbers are not where they say."""
    given = [random((8, 3, 4), 0), random((8, 3, 4), 1), *(torch.ones(3) for _ in range(3))]
    assert norms.backward(*(t.double() for t in given), Groups(8, 4)) is not None
    given[1] = torch._neg_view(given[1])
    assert norms.backward(*given, Groups(8, 4)) is not None
    assert written == []


@pytest.mark.parametrize("feedback", ["linear", "nonlinear"])
def test_steps_are_the_same(written: list[int], monkeypatch: pytest.MonkeyPatch, feedback: str) -> None:
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten()]
        model = nn.Sequential(*layers, nn.BatchNorm1d(32), nn.Linear(32, 2))
        opt = OCNOpt(model.parameters(), model=model, lr=0.1, rank=3, curvature="identity", feedback=feedback)
        with monkeypatch.context() as patch:
            if not ours:
                patch.setattr(binding, "can_read", lambda *_: False)
            for _ in range(3):
                opt.zero_grad()
                model(torch.randn(7, 3, 4, 4)).square().mean().backward()
                opt.step()
        found.append([p.detach().clone() for p in model.parameters()])
    assert written == 6 * [3]  # two layers, three steps
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)

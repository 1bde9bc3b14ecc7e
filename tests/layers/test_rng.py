from __future__ import annotations

import pytest
import torch

from ocnopt.rng import RNGState


def test_repeats_and_goes_on_as_if_nothing_happened() -> None:
    torch.manual_seed(0)
    state = RNGState.capture()
    first = torch.rand(5)
    with state.restored():
        assert torch.equal(torch.rand(5), first)
    after = torch.rand(5)
    torch.manual_seed(0)
    torch.rand(5)
    assert torch.equal(torch.rand(5), after)
    with state.restored():  # as often as one likes
        assert torch.equal(torch.rand(5), first)


def test_goes_on_after_an_error() -> None:
    state = RNGState.capture()
    torch.rand(3)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="size"), state.restored():
        torch.rand(7) @ torch.rand(6)
    assert torch.equal(torch.get_rng_state(), before)


def test_devices_may_repeat() -> None:
    assert list(RNGState.capture(["cpu", torch.device("cpu")]).states) == [torch.device("cpu")]


@pytest.mark.gpu
def test_cuda() -> None:
    state = RNGState.capture([torch.device("cuda")])
    first = torch.rand(5, device="cuda"), torch.rand(5)
    after = torch.cuda.get_rng_state()
    with state.restored():
        assert torch.equal(torch.rand(5, device="cuda"), first[0])
        assert torch.equal(torch.rand(5), first[1])
    assert torch.equal(torch.cuda.get_rng_state(), after)

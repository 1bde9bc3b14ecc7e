"""Memory is lent again once nobody holds it, and not a moment earlier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.toys import backward
from torch import Tensor, nn

from ocnopt import OCNOpt
from ocnopt import stock as stock_module
from ocnopt.fused.native import binding, taps
from ocnopt.layers import conv
from ocnopt.stock import Stock

SHAPE = (3, 5)


@pytest.fixture(autouse=True)
def no_size_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock_module, "_FEW", 1)


@pytest.fixture
def stock() -> Stock:
    return Stock()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16])
@pytest.mark.parametrize("shape", [SHAPE, (7,), (), (0, 4)])
def test_a_tensor_is_as_of_torch_empty(stock: Stock, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = stock.empty(shape, dtype)
    assert (found.shape, found.dtype, found.device.type) == (torch.Size(shape), dtype, "cpu")
    assert found.is_contiguous()
    assert found.untyped_storage().nbytes() == found.numel() * dtype.itemsize
    assert torch.equal(found.fill_(2) + found, torch.full(shape, 4, dtype=dtype))


def test_memory_is_lent_again_once_nobody_holds_it(stock: Stock) -> None:
    first, second = stock.empty(SHAPE, torch.float32), stock.empty(SHAPE, torch.float32)
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    del first, second
    again = [stock.empty(SHAPE, torch.float32) for _ in range(3)]
    assert len({t.data_ptr() for t in again}) == 3
    assert places < {t.data_ptr() for t in again}


def test_it_is_of_use_to_other_dtypes_and_shapes_of_as_many_bytes(stock: Stock) -> None:
    place = stock.empty((4, 6), torch.float32).data_ptr()
    assert stock.empty((12,), torch.float64).data_ptr() == place


def held_by_a_view(t: Tensor) -> Any:
    return t[1:, 2]


def held_by_an_alias(t: Tensor) -> Any:
    return t.detach()


def held_by_numpy(t: Tensor) -> Any:
    return t.numpy()


def held_by_the_storage(t: Tensor) -> Any:
    return t.untyped_storage()


@pytest.mark.parametrize("hold", [held_by_a_view, held_by_an_alias, held_by_numpy, held_by_the_storage])
def test_nobody_else_gets_what_somebody_holds(stock: Stock, hold: Any) -> None:
    tensor = stock.empty(SHAPE, torch.float32)
    place, held = tensor.data_ptr(), hold(tensor)
    del tensor
    other = stock.empty(SHAPE, torch.float32)
    assert other.data_ptr() != place
    del held
    assert stock.empty(SHAPE, torch.float32).data_ptr() == place


def test_what_a_step_did_not_need_is_let_go_of(stock: Stock) -> None:
    held = [stock.empty(SHAPE, torch.float32) for _ in range(3)]
    held.clear()
    stock.tidy()
    assert len(stock.blocks) == 3  # all were lent since the last time
    for _ in range(2):
        stock.empty(SHAPE, torch.float32)
    stock.tidy()
    assert len(stock.blocks) == 1  # of the three, one at a time was enough
    stock.tidy()
    assert stock.blocks == []


def test_a_stock_that_is_gone_leaves_what_it_lent() -> None:
    found = Stock().empty(SHAPE, torch.float32).fill_(1)
    others = [torch.empty(SHAPE).fill_(2) for _ in range(100)]
    assert found.sum() == 15
    assert len(others) == 100


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 5).mT,
        torch.randn(6, 5)[::2],
        torch.randn(5).expand(3, 5),
        torch.randn(()),
        torch.randn(0, 3),
        torch.arange(6),
    ],
    ids=lambda t: f"{tuple(t.shape)} {t.stride()}",
)
def test_copies_are_laid_out_alike(stock: Stock, tensor: Tensor) -> None:
    (copy,) = stock.copied([tensor])
    torch.testing.assert_close(copy, tensor, rtol=0, atol=0)
    assert copy.stride() == torch.empty_like(tensor).stride()
    place = copy.data_ptr()
    assert place != tensor.data_ptr() or not tensor.numel()
    del copy
    assert stock.copied([tensor])[0].data_ptr() == place


def test_small_tensors_and_those_elsewhere_are_left_to_torch(monkeypatch: pytest.MonkeyPatch, stock: Stock) -> None:
    assert stock.copied([torch.empty(3, device="meta")])[0].is_meta
    monkeypatch.setattr(stock_module, "_FEW", 5)
    for size in (4, 5):
        stock.empty((size,), torch.uint8)
    assert [block.numel() for block in stock.blocks] == [5]


def test_another_default_device_is_of_no_account(stock: Stock) -> None:
    with torch.device("meta"):
        assert stock.empty(SHAPE, torch.float32).fill_(1).sum() == 15


RANK = 2


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(2, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.Flatten(),
        nn.LazyLinear(3),
    )
    model = nn.Sequential(*layers)
    model(torch.zeros(1, 2, 4, 4))
    return model


class Training:
    """Of a network whose group gradients come from the kernel; where these were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: list[tuple[int, ...]] = []
        self._found: list[int] = []
        real = taps.gradients

        def noted(*args: Any) -> Tensor:
            found = real(*args)
            self._found.append(found.data_ptr())
            return found

        monkeypatch.setattr(taps, "_LANES", 4)
        monkeypatch.setattr(taps, "gradients", noted)
        monkeypatch.setattr(conv, "suits_taps", lambda groups, *_: groups.rank > 1)
        self.model = network()
        self.opt = OCNOpt(self.model.parameters(), model=self.model, rank=RANK)

    def step(self, samples: int = 6) -> None:
        backward(self.model, torch.randn(samples, 2, 4, 4), torch.randint(3, (samples,)))
        self.opt.step()
        self.places.append(tuple(self._found))
        self._found.clear()

    @property
    def kept(self) -> int:
        return self.opt.memory_usage().get("to be used again", 0)

    @property
    def needed(self) -> int:
        weights = [m.weight for m in self.model.modules() if isinstance(m, nn.Conv2d)]
        return RANK * sum(w.numel() * w.element_size() for w in weights)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    if isinstance(binding.library(), str):
        pytest.skip(str(binding.library()))
    return Training(monkeypatch)


def test_group_gradients_of_all_steps_share_their_memory(training: Training) -> None:
    for samples in (6, 6, 4, 6):
        training.step(samples)
    assert len(training.places[0]) == 2
    assert {frozenset(of_step) for of_step in training.places} == {frozenset(training.places[0])}
    assert training.kept == training.needed


def test_that_memory_is_let_go_of_when_it_is_not_needed(training: Training) -> None:
    training.step()
    training.opt.param_groups[0]["rank"] = 1
    training.step()
    assert training.kept == 0


def test_an_optimizer_that_leaves_its_model_keeps_none(training: Training) -> None:
    training.step()
    training.opt.detach()
    assert training.kept == 0


def copies_of(every: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Where they are that may have to be put back, of each of eight steps with Kronecker curvature."""
    places: list[tuple[int, ...]] = []
    real = Stock.copied

    def noted(self: Stock, tensors: Sequence[Tensor]) -> list[Tensor]:
        copies = real(self, tensors)
        places.append(tuple(t.data_ptr() for t in copies))
        return copies

    monkeypatch.setattr(Stock, "copied", noted)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    opt = OCNOpt(
        model.parameters(),
        0.01,
        model=model,
        curvature="kronecker",
        feedback="nonlinear",
        momentum=0,
        refresh_every=every,
    )
    for _ in range(8):
        backward(model, torch.randn(6, 5), torch.randint(3, (6,)))
        opt.step()
    return places


def test_bases_that_stay_as_they_are_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers: four parameters; of each layer two factors, eigenvalues and a count; of one at a time two bases."""
    assert [len(of_step) for of_step in copies_of(3, monkeypatch)] == [4, 12, 14, 12, 14, 14, 12, 14]


def test_copies_of_all_steps_share_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _, *places = copies_of(1000, monkeypatch)
    assert {len(of_step) for of_step in places} == {12}
    assert len({frozenset(of_step) for of_step in places}) == 1

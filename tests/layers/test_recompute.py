from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.layers.oracle import adapter_of, assert_same, brute_force, call_of, check
from torch import Tensor, nn

from ocnopt.groups import Groups
from ocnopt.layers import Call, Recompute, outer, register
from ocnopt.rng import RNGState


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Bilinear(nn.Module):
    """Not linear in its parameters, random, and with a buffer that counts the calls."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(rows(3, 4)), nn.Parameter(rows(4))
        self.unused = nn.Parameter(rows(2))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        self.count += 1
        noisy = nn.functional.dropout(x, 0.3, self.training)
        return {"y": scale * torch.tanh(noisy @ self.a) * self.b.exp()}


class Plain(Bilinear):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(x, scale)["y"]


register(Plain, Recompute())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("piece", [1, 40, 2**24])
def test_any_module(training: bool, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "PIECE", piece)
    check(Plain().train(training), rows(5, 2, 3), scale=2.0)


def test_buffers_and_random_numbers_stay_as_they_are() -> None:
    layer = Plain()
    call = call_of(layer, rows(5, 3))
    before, state = layer.count.clone(), torch.get_rng_state()
    with torch.no_grad():
        adapter_of(layer).group_gradients(call, Groups(5, 2))
    assert layer.count == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in layer.parameters())


def test_random_numbers_must_be_kept() -> None:
    call = replace(call_of(Plain(), rows(5, 3)), rng=None)
    with pytest.raises(ValueError, match=r"call\.rng must be kept for Plain"):
        adapter_of(call.module).group_gradients(call, Groups(5, 2))
    quiet = Recompute(random=False)
    assert not quiet.needs_rng(call.module)
    assert quiet.group_gradients(replace(call, training=False), Groups(5, 2)).keys() == {"a", "b", "unused"}


def test_the_mode_is_that_of_the_call() -> None:
    layer = Plain()
    call = call_of(layer, rows(5, 3))
    with torch.no_grad():
        expected = adapter_of(layer).gram(call)
        layer.eval()
        assert_same(adapter_of(layer).gram(call), expected)
    assert not layer.training


def test_first_tensor_of_the_output() -> None:
    layer = Bilinear().eval()
    x = rows(5, 3)
    h = rows(5, 4)
    call = Call(layer, (x,), {}, h, RNGState.capture())
    plain = call_of(Plain().eval(), x)
    plain.h = h
    assert_same(Recompute().group_gradients(call, Groups(5, 2))["a"], brute_force(plain, Groups(5, 2))["a"])


def test_no_tensor_at_all() -> None:
    class Silent(nn.Linear):
        def forward(self, x: Tensor) -> str:  # type: ignore[override]
            return "nothing"

    call = Call(Silent(2, 2), (rows(3, 2),), {}, rows(3, 2), RNGState.capture())
    with pytest.raises(TypeError, match="must return a tensor, got str"):
        Recompute().group_gradients(call, Groups(3, 2))


def test_parameters_without_effect() -> None:
    class Constant(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    call = call_of(Constant(2, 2), rows(3, 2))
    gradients = Recompute().group_gradients(call, Groups(3, 2))
    assert_same(gradients["bias"], torch.zeros(2, 2))


def test_nothing_to_train() -> None:
    call = call_of(Plain().requires_grad_(False), rows(3, 3))
    assert adapter_of(call.module).group_gradients(call, Groups(3, 2)) == {}


class Rank(torch.autograd.Function):
    """Its backward looks at numbers, which batches of adjoints do not allow."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, h: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * h if h.abs().sum().item() >= 0 else h


class Stubborn(Plain):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        result: Tensor = Rank.apply(super().forward(x, scale))
        return result


register(Stubborn, Recompute())


@pytest.mark.parametrize("piece", [40, 2**24])
def test_operations_without_a_rule_for_batches(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "PIECE", piece)
    check(Stubborn(), rows(5, 2, 3))


def test_groups_do_not_spoil_each_other() -> None:
    call = call_of(Plain(), rows(4, 3))
    call.h[3] = torch.inf
    with torch.no_grad():
        gradients = adapter_of(call.module).group_gradients(call, Groups(4, 2))
    assert gradients["a"][0].isfinite().all()
    assert not gradients["a"][1].isfinite().all()


def test_coupled_samples_count_by_row() -> None:
    class Centred(Plain):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
            y = super().forward(x, scale)
            return y - y.mean(0)

    register(Centred, Recompute())
    check(Centred(), rows(5, 3))


def test_parameters_of_children() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 2).double()
            self.scale = nn.Parameter(rows(2))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.inner.weight, self.inner.bias) * self.scale

    register(Folded, Recompute(children=True, random=False))
    check(Folded(), rows(5, 3), names={"inner.weight", "inner.bias", "scale"})
    register(Folded, Recompute(random=False))
    check(Folded(), rows(5, 3), names={"scale"})


def test_hooks_of_the_module_do_not_run_again() -> None:
    layer, calls = Plain(), []
    layer.register_forward_hook(lambda *_: calls.append(1))
    call = call_of(layer, rows(5, 3))
    with torch.no_grad():
        adapter_of(layer).group_gradients(call, Groups(5, 2))
    assert len(calls) == 1


def test_changing_the_input_in_place_is_an_error() -> None:
    class Overwriting(Plain):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
            return super().forward(x.relu_(), scale)

    call = call_of(Overwriting(), rows(5, 3))
    with pytest.raises(ValueError, match="Overwriting changes its input in place"):
        Recompute().group_gradients(call, Groups(5, 2))


def test_autocast_of_the_call() -> None:
    layer = Plain().float().eval()
    x = rows(5, 3).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        call = replace(call_of(layer, x), autocast=torch.bfloat16)
    with torch.no_grad():
        gradients = Recompute().group_gradients(call, Groups(5, 2))
    assert gradients["a"].dtype == torch.float32
    expected = brute_force(call_of(Plain().eval(), x.double()), Groups(5, 2))
    assert (gradients["a"] - expected["a"]).abs().max() < 0.05 * expected["a"].abs().max()
    with pytest.raises(RuntimeError, match="dtype"):  # float32 weights and bfloat16 inputs, without autocast
        Recompute().group_gradients(replace(call, autocast=None), Groups(5, 2))

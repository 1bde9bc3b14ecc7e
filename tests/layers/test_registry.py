from __future__ import annotations

import pytest
import torch
from tests.layers.oracle import check
from torch import Tensor, nn

from ocnopt.groups import Groups
from ocnopt.layers import Adapter, Call, Recompute, find, register


class Scale(nn.Module):
    """A made-up layer: one factor per feature and an offset for all of them."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(features, dtype=torch.float64))
        self.offset = nn.Parameter(torch.randn((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.offset


@register(Scale)
class ScaleAdapter(Adapter):
    """Only what must be written."""

    def group_gradients(self, call: Call, groups: Groups) -> dict[str, Tensor]:
        return {"factor": groups.sum(call.h * call.x), "offset": groups.sum(call.h.sum(1))}


def test_a_layer_of_ones_own() -> None:
    call = check(Scale(4), torch.randn(7, 4, dtype=torch.float64))
    adapter, reason = find(call.module)
    assert isinstance(adapter, ScaleAdapter)
    assert reason is None
    assert not adapter.prefers_gram(call, 7)
    assert not adapter.needs_rng(call.module)
    assert not adapter.couples_samples(call.module)
    assert adapter.kronecker_names(call.module) == ()
    for ask in (
        lambda: adapter.kronecker_inputs(call),
        lambda: adapter.to_matrix(call.module, {}),
        lambda: adapter.from_matrix(call.module, torch.zeros(1, 1, 1)),
    ):
        with pytest.raises(TypeError, match="ScaleAdapter has no Kronecker structure"):
            ask()


def test_no_adapter() -> None:
    assert find(nn.LSTM(2, 2)) == (None, "no adapter is registered for LSTM")


def test_subclasses_are_treated_alike() -> None:
    class Named(nn.Linear):
        label = "mine"

    check(Named(3, 2).double(), torch.randn(4, 3, dtype=torch.float64))


def test_an_overridden_forward_is_refused_until_registered() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Further(Doubled):
        pass

    for layer in (Doubled(3, 2), Further(3, 2)):
        adapter, reason = find(layer)
        assert adapter is None
        assert reason == f"{type(layer).__name__} overrides the forward of Linear"
    register(Doubled, Recompute(random=False))
    check(Doubled(3, 2).double(), torch.randn(4, 3, dtype=torch.float64))
    check(Further(3, 2).double(), torch.randn(4, 3, dtype=torch.float64))


def test_a_replaced_forward_is_refused() -> None:
    layer = nn.Linear(3, 2)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    adapter, reason = find(layer)
    assert adapter is None
    assert reason == "the forward of this Linear has been replaced by another function"


def test_the_last_registration_counts() -> None:
    class Own(Scale):
        pass

    register(Own, Recompute())
    register(Own, later := Recompute())
    assert find(Own(2)) == (later, None)


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match=r"module_type must be a subclass of torch\.nn\.Module, got 'Linear'"):
        register("Linear", Recompute())  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"module_type must be a subclass of torch\.nn\.Module, got <class 'int'>"):
        register(int, Recompute())  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"adapter must be an instance of ocnopt\.layers\.Adapter, got .*ScaleAdapter"):
        register(Scale, ScaleAdapter)  # type: ignore[call-overload]


def test_dropped_samples_are_refused() -> None:
    call = Call(Scale(4), (torch.randn(7, 4),), {}, torch.randn(3, 4))
    assert "cannot be the samples" in str(ScaleAdapter().call_refusal(call))

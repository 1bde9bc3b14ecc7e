"""Half precision comes in, float32 goes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.layers.oracle import adapter_of, brute_force, call_of
from torch import Tensor, nn

from ocnopt.groups import Groups

x = torch.randn
LAYERS: list[tuple[nn.Module, tuple[Any, ...]]] = [
    (nn.Linear(4, 3), (x(5, 2, 4),)),
    (nn.Conv2d(4, 3, 2), (x(5, 4, 3, 3),)),
    (nn.ConvTranspose1d(4, 3, 2), (x(5, 4, 3),)),
    (nn.LayerNorm(4), (x(5, 2, 4),)),
    (nn.RMSNorm(4), (x(5, 2, 4),)),
    (nn.GroupNorm(2, 4), (x(5, 4, 3),)),
    (nn.BatchNorm1d(4), (x(5, 4, 3),)),
    (nn.BatchNorm1d(4).eval(), (x(5, 4, 3),)),
    (nn.Embedding(6, 4), (torch.randint(6, (5, 3)),)),
    (nn.MultiheadAttention(4, 2, batch_first=True), (x(5, 3, 4),) * 3),
    (nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True), (x(5, 3, 4),) * 3),
]


def cast(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    # one tensor stays one tensor: attention treats equal inputs as one
    memo: dict[int, Tensor] = {}
    return tuple(memo.setdefault(id(a), a.to(dtype) if a.is_floating_point() else a) for a in args)


@pytest.mark.parametrize(("layer", "args"), LAYERS, ids=[str(layer) for layer, _ in LAYERS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dtypes(layer: nn.Module, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    call = call_of(layer.to(dtype), *cast(args, dtype))
    adapter, groups = adapter_of(layer), Groups(5, 2)
    out = torch.float64 if dtype == torch.float64 else torch.float32
    with torch.no_grad():
        gradients = adapter.group_gradients(call, groups)
        assert {g.dtype for g in gradients.values()} == {out}
        assert adapter.gram(call).dtype == out
        assert adapter.project(call, {n: g[0] for n, g in gradients.items()}).dtype == out
        assert adapter.group_gradients(call.weighted(torch.rand(5)), groups).keys() == gradients.keys()
        if adapter.kronecker_names(layer):
            inputs = adapter.kronecker_inputs(call)
            assert {inputs.x.dtype, inputs.h.dtype} == {out}
    exact = call_of(layer.double(), *cast(args, torch.float64))
    exact.h = call.h.double()
    for name, expected in brute_force(exact, groups).items():
        error = (gradients[name] - expected).abs().max() / expected.abs().max()
        assert error < {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 0.1)


def test_inputs_in_another_precision_than_adjoints() -> None:
    """Under autocast a layer may read float32 and write bfloat16, or the other way round."""
    call = call_of(nn.Linear(4, 3), torch.randn(5, 4))
    call.h = call.h.bfloat16()
    gradients = adapter_of(call.module).group_gradients(call, Groups(5, 2))
    assert {g.dtype for g in gradients.values()} == {torch.float32}


def test_weights_of_samples_are_not_rounded() -> None:
    call = call_of(nn.Linear(4, 3).bfloat16(), torch.randn(5, 4).bfloat16())
    w = torch.full((5,), 1 + 2**-12)
    torch.testing.assert_close(call.weighted(w).h, call.h.float() * w[0], rtol=0, atol=0)

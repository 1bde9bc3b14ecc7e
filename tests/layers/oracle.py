"""The slow truth about a layer: one backward pass of autograd per group of samples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ocnopt.groups import Groups
from ocnopt.layers import Adapter, Call, find
from ocnopt.rng import RNGState

TOLERANCE = 1e-10
SEED = 1234


def call_of(module: nn.Module, *args: Any, **kwargs: Any) -> Call:
    """Run a module and make up an adjoint of its output."""
    torch.manual_seed(SEED)
    rng = RNGState.capture()
    with torch.no_grad():
        output = first(module(*args, **kwargs))
    h = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return Call(module, args, kwargs, h.to(output.dtype), rng)


def first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def adapter_of(module: nn.Module) -> Adapter:
    adapter, reason = find(module)
    assert adapter is not None, reason
    return adapter


def autograd(call: Call, h: Tensor) -> dict[str, Tensor]:
    """The gradients of all trainable parameters, children's included."""
    module = call.module
    module.zero_grad()
    torch.manual_seed(SEED)
    first(module(*call.args, **call.kwargs)).backward(h)
    trainable = ((name, p) for name, p in module.named_parameters() if p.requires_grad)
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trainable}
    module.zero_grad()
    return gradients


def brute_force(call: Call, groups: Groups) -> dict[str, Tensor]:
    """``[r, *shape]`` for each parameter."""
    rows = groups.of_rows()
    masks = [(rows == g).view(-1, *[1] * (call.h.dim() - 1)) for g in range(groups.rank)]
    columns = [autograd(call, call.h * mask) for mask in masks]
    return {name: torch.stack([c[name] for c in columns]) for name in columns[0]}


def flat(g: Tensor) -> Tensor:
    return g.reshape(len(g), -1)


def assert_same(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE)


def check(
    module: nn.Module,
    *args: Any,
    ranks: Iterable[int] = (1, 2, 3, 10**6),
    names: set[str] | None = None,
    **kwargs: Any,
) -> Call:
    """Everything an adapter promises. ``names``: the parameters it must cover, all trainable ones by default."""
    call, adapter = call_of(module, *args, **kwargs), adapter_of(module)
    assert adapter.call_refusal(call) is None
    if names is None:
        names = {name for name, p in module.named_parameters() if p.requires_grad}
    assert set(adapter.parameters(module)) == names
    with torch.no_grad():
        for rank in ranks:
            check_groups(adapter, call, Groups(call.batch, rank), names)
        check_samples(adapter, call)
        check_kronecker(adapter, call)
    return call


def check_groups(adapter: Adapter, call: Call, groups: Groups, names: set[str]) -> None:
    with torch.enable_grad():
        expected, whole = brute_force(call, groups), autograd(call, call.h)
    actual = adapter.group_gradients(call, groups)
    assert set(actual) == names
    for name, g in actual.items():
        assert_same(g, expected[name])
        assert_same(g.sum(0), whole[name])


def check_samples(adapter: Adapter, call: Call) -> None:
    """Gram form and projections against the explicit gradients of the samples."""
    per_sample = adapter.group_gradients(call, Groups(call.batch, call.batch))
    grams = adapter.grams(call)
    assert grams.keys() == per_sample.keys()
    for name, g in per_sample.items():
        assert_same(grams[name], flat(g) @ flat(g).T)
    assert_same(adapter.gram(call), sum(grams.values(), torch.zeros(())))
    noise = torch.Generator().manual_seed(3)
    v = {n: torch.randn(g.shape[1:], generator=noise, dtype=g.dtype) for n, g in per_sample.items()}
    products = [flat(g) @ v[name].flatten() for name, g in per_sample.items()]
    assert_same(adapter.project(call, v), torch.stack(products).sum(0))
    for name, product in zip(per_sample, products, strict=True):
        assert_same(adapter.project(call, {name: v[name]}), product)


def check_kronecker(adapter: Adapter, call: Call) -> None:
    names = adapter.kronecker_names(call.module)
    if not names:
        return
    inputs = adapter.kronecker_inputs(call)
    assert inputs.x.shape[:3] == inputs.h.shape[:3]
    assert inputs.x.shape[0] == call.batch
    matrices = torch.einsum("nbtc,nbta->nbca", inputs.h, inputs.x)
    assert adapter.kronecker_positions(call) == inputs.h.shape[2]
    assert_same(adapter.kronecker_gradients(call), matrices)
    for found, v in zip(adapter.kronecker_sums(call), (inputs.x, inputs.h), strict=True):
        assert_same(found, torch.einsum("nbti,nbtj->bij", v, v))
    per_sample = adapter.group_gradients(call, Groups(call.batch, call.batch))
    rebuilt = adapter.from_matrix(call.module, matrices)
    assert tuple(rebuilt) == names
    for name in names:
        assert_same(rebuilt[name], per_sample[name])
    assert_same(adapter.to_matrix(call.module, rebuilt), matrices)
    alone = {name: g[0] for name, g in rebuilt.items()}  # no leading dimension
    assert_same(adapter.to_matrix(call.module, alone), matrices[0])
    two = {name: g.unsqueeze(0) for name, g in rebuilt.items()}  # two of them
    assert_same(adapter.to_matrix(call.module, two), matrices.unsqueeze(0))

"""MultiheadAttention: four projections around a core without parameters.

The core is run again, by the module itself with identity matrices for its projections, so that masks, dropout
and options are torch's own. One backward pass through it gives the adjoints of the projected queries, keys
and values of all samples at once, since samples do not meet in attention; four linear layers are left.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ocnopt.groups import Groups
from ocnopt.layers import outer
from ocnopt.layers.base import Call, compute_dtype
from ocnopt.layers.recompute import Recompute, precision, repeat
from ocnopt.layers.registry import register

_INPUTS = ("query", "key", "value")
_SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


@dataclass
class Projection:
    """One linear map of the module, ``x`` and ``h`` as in :mod:`ocnopt.layers.outer`.

    Several of them may be rows of one parameter, in the order in which they are listed.
    """

    weight: str
    bias: str
    x: Tensor
    h: Tensor


@register(nn.MultiheadAttention)
class AttentionAdapter(Recompute):
    """Four linear layers, or plain recomputation for ``add_bias_kv`` and parametrised projections."""

    def __init__(self) -> None:
        super().__init__()

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        # out_proj is never called: its parameters belong to the attention's own call.
        out = super().parameters(_attention(module).out_proj)
        return super().parameters(module) | {f"out_proj.{name}": p for name, p in out.items()}

    def needs_rng(self, module: nn.Module) -> bool:
        return bool(_attention(module).dropout > 0)

    def group_gradients(self, call: Call, groups: Groups) -> dict[str, Tensor]:
        if not _is_projections(_attention(call.module)):
            return super().group_gradients(call, groups)
        gradients: dict[str, list[Tensor]] = {}
        for p in self._projections(call):
            gradients.setdefault(p.weight, []).append(outer.group_sums(p.x, p.h, groups).squeeze(1))
            gradients.setdefault(p.bias, []).append(groups.sum(p.h.sum((1, 2))))
        return {name: torch.cat(gradients[name], dim=1) for name in self.parameters(call.module)}

    def grams(self, call: Call) -> dict[str, Tensor]:
        if not _is_projections(_attention(call.module)):
            return super().grams(call)
        grams: dict[str, list[Tensor]] = {}
        for p in self._projections(call):
            rows = p.h.sum((1, 2))
            grams.setdefault(p.weight, []).append(outer.gram(p.x, p.h))
            grams.setdefault(p.bias, []).append(rows @ rows.T)
        return {name: torch.stack(grams[name]).sum(0) for name in self.parameters(call.module)}

    def project(self, call: Call, direction: Mapping[str, Tensor]) -> Tensor:
        if not _is_projections(_attention(call.module)):
            return super().project(call, direction)
        projections = self._projections(call)
        total = projections[0].h.new_zeros(call.batch)
        for name, v in direction.items():
            of_bias = v.dim() == 1
            parts = [p for p in projections if name == (p.bias if of_bias else p.weight)]
            if not parts:
                raise KeyError(f"direction has {name!r}, which is not a parameter of {call.module}")
            for p, rows in zip(parts, v.to(total.dtype).chunk(len(parts)), strict=True):
                change = rows if of_bias else F.linear(p.x, rows)
                total += (p.h * change).sum((1, 2, 3))
        return total

    def prefers_gram(self, call: Call, rank: int) -> bool:
        module = _attention(call.module)
        width, positions = module.embed_dim, max(v.shape[1] for v in _inputs(call))
        cheaper = outer.gram_is_cheaper(call.batch, positions, width, width, rank, outer.traffic(call.h))
        return cheaper and _is_projections(module)

    def refusal(self, module: nn.Module) -> str | None:
        if _attention(module).batch_first:
            return None
        return "with batch_first=False dimension 0 of its input is the sequence, not the samples"

    def call_refusal(self, call: Call) -> str | None:
        if call.h.dim() != 3:
            return "its input has no dimension of samples: MultiheadAttention was given one sequence alone"
        return super().call_refusal(call)

    def _projections(self, call: Call) -> list[Projection]:
        """Queries, keys, values, output."""
        self.check_rng(call)
        module = _attention(call.module)
        x = _inputs(call)
        with precision(call):
            projected = [F.linear(*v) for v in zip(x, *_in_projections(module), strict=True)]
        leaves = [v.detach().requires_grad_() for v in projected]
        options = {name: v for name, v in _arguments(call).items() if name not in _INPUTS}
        output = repeat(call, _identities(module), leaves, options)
        h = call.h.to(compute_dtype(call.h.dtype)) @ module.out_proj.weight.to(compute_dtype(call.h.dtype))
        adjoints = torch.autograd.grad(output, leaves, h.to(output.dtype))
        weights = _weight_names(module)
        return [
            *(_projection(n, "in_proj_bias", *v) for n, *v in zip(weights, x, adjoints, strict=True)),
            _projection("out_proj.weight", "out_proj.bias", output.detach(), call.h),
        ]


def _attention(module: nn.Module) -> nn.MultiheadAttention:
    assert isinstance(module, nn.MultiheadAttention)
    return module


def _arguments(call: Call) -> dict[str, Any]:
    bound = _SIGNATURE.bind(call.module, *call.args, **call.kwargs).arguments
    return {name: value for name, value in bound.items() if name != "self"}


def _inputs(call: Call) -> list[Tensor]:
    arguments = _arguments(call)
    return [arguments[name].detach() for name in _INPUTS]


def _weight_names(module: nn.MultiheadAttention) -> list[str]:
    if module._qkv_same_embed_dim:
        return ["in_proj_weight"] * 3
    return ["q_proj_weight", "k_proj_weight", "v_proj_weight"]


def _is_projections(module: nn.MultiheadAttention) -> bool:
    """bias_k and bias_v act inside the core; a parametrised weight cannot be exchanged for an identity."""
    own, of_out = module._parameters, module.out_proj._parameters
    plain = {*_weight_names(module), "in_proj_bias"} <= own.keys() and {"weight", "bias"} <= of_out.keys()
    return plain and module.bias_k is None


def _in_projections(module: nn.MultiheadAttention) -> tuple[list[Tensor], list[Tensor | None]]:
    weights = list(dict.fromkeys(_weight_names(module)))
    rows = [part for name in weights for part in getattr(module, name).chunk(3 // len(weights))]
    bias: Tensor | None = module.in_proj_bias
    return rows, [None] * 3 if bias is None else list(bias.chunk(3))


def _identities(module: nn.MultiheadAttention) -> dict[str, Tensor]:
    """Parameters with which the module is its core alone."""
    weight = module.out_proj.weight
    eye = torch.eye(module.embed_dim, dtype=weight.dtype, device=weight.device)
    names = _weight_names(module)
    replaced = {name: eye.repeat(names.count(name), 1) for name in names} | {"out_proj.weight": eye}
    for name, bias in (("in_proj_bias", module.in_proj_bias), ("out_proj.bias", module.out_proj.bias)):
        if bias is not None:
            replaced[name] = torch.zeros_like(bias)
    return replaced


def _projection(weight: str, bias: str, x: Tensor, h: Tensor) -> Projection:
    dtype = compute_dtype(torch.promote_types(x.dtype, h.dtype))
    return Projection(weight, bias, x.to(dtype).unsqueeze(1), h.to(dtype).unsqueeze(1))

"""Embeddings: a sample's gradient adds each adjoint to the row of its token."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ocnopt.groups import Groups
from ocnopt.layers import outer
from ocnopt.layers.base import Adapter, Call, compute_dtype
from ocnopt.layers.registry import register


@register(nn.Embedding)
class EmbeddingAdapter(Adapter):
    """The weight is a matrix times one-hot inputs, and treated as one without writing these out."""

    covers = ("weight",)

    def group_gradients(self, call: Call, groups: Groups) -> dict[str, Tensor]:
        if not self.parameters(call.module):
            return {}
        tokens, h = _tokens_and_adjoints(call)
        return {"weight": _scatter(tokens, h, groups, _embedding(call).num_embeddings)}

    def grams(self, call: Call) -> dict[str, Tensor]:
        if not self.parameters(call.module):
            return {}
        tokens, h = _tokens_and_adjoints(call)
        vocabulary = _embedding(call).num_embeddings
        if tokens.shape[1] ** 2 <= vocabulary:
            return {"weight": _gram_by_pairs(tokens, h)}
        return {"weight": _gram_by_gradients(tokens, h, vocabulary)}

    def project(self, call: Call, direction: Mapping[str, Tensor]) -> Tensor:
        tokens, h = _tokens_and_adjoints(call)
        total = h.new_zeros(call.batch)
        for name, v in direction.items():
            if name != "weight":
                raise KeyError(f"direction has {name!r}, which is not a parameter of {call.module}")
            total += torch.linalg.vecdot(h.flatten(1), v.to(h.dtype)[tokens].flatten(1))
        return total

    def prefers_gram(self, call: Call, rank: int) -> bool:
        # Per feature of the embedding; see outer.gram_is_cheaper.
        shared, vocabulary = math.prod(call.h.shape[1:-1]), _embedding(call).num_embeddings
        by_pairs = (call.batch * shared) ** 2
        traffic = outer.traffic(call.h)
        by_gradients = vocabulary * call.batch * (call.batch + traffic)
        return rank > 1 and min(by_pairs, by_gradients) < vocabulary * rank * (rank + traffic)

    def refusal(self, module: nn.Module) -> str | None:
        assert isinstance(module, nn.Embedding)
        return "its gradients are sparse (sparse=True)" if module.sparse else None


def _embedding(call: Call) -> nn.Embedding:
    assert isinstance(call.module, nn.Embedding)
    return call.module


def _tokens_and_adjoints(call: Call) -> tuple[Tensor, Tensor]:
    """``[B, T]`` and ``[B, T, features]``, the adjoints scaled as the layer's options say."""
    module = _embedding(call)
    h = call.h.to(compute_dtype(call.h.dtype))
    shared = math.prod(h.shape[1:-1])
    tokens, h = call.x.reshape(call.batch, shared), h.reshape(call.batch, shared, h.shape[-1])
    if module.padding_idx is not None:
        h = h.masked_fill((tokens == module.padding_idx).unsqueeze(-1), 0)
    if module.scale_grad_by_freq:  # the frequency in the whole mini-batch, not in the group
        counts = torch.zeros(module.num_embeddings, dtype=h.dtype, device=h.device)
        counts = counts.index_add_(0, tokens.flatten(), h.new_ones(tokens.numel()))
        h = h / counts[tokens].unsqueeze(-1)
    return tokens, h


def _scatter(tokens: Tensor, h: Tensor, groups: Groups, vocabulary: int) -> Tensor:
    """``[r, vocabulary, features]``: every group has its own copy of the rows."""
    rows = groups.of_rows(h.device).unsqueeze(1) * vocabulary + tokens
    # As autograd does it: faster than index_add on a CPU, and deterministic on a GPU. -1: no padding.
    out: Tensor = torch.ops.aten.embedding_dense_backward(h, rows, groups.rank * vocabulary, -1, False)
    return out.reshape(groups.rank, vocabulary, h.shape[-1])


def _gram_by_pairs(tokens: Tensor, h: Tensor) -> Tensor:
    """K_ij = Σ_{t,t'} [token_it = token_jt'] h_it·h_jt'."""
    batch, shared = tokens.shape
    every = tokens.flatten()
    h_every = h.flatten(0, 1)
    K = h.new_zeros(batch, batch)
    for samples in outer.pieces(batch, batch * shared**2):
        pairs = h[samples].flatten(0, 1) @ h_every.T
        pairs = pairs * (tokens[samples].flatten().unsqueeze(1) == every)
        K[samples] = pairs.reshape(-1, shared, batch, shared).sum((1, 3))
    return K


def _gram_by_gradients(tokens: Tensor, h: Tensor, vocabulary: int) -> Tensor:
    """The samples' gradients themselves, some features at a time, when sequences are long and words few."""
    batch = tokens.shape[0]
    each = Groups(batch, batch)
    K = h.new_zeros(batch, batch)
    for features in outer.pieces(h.shape[-1], batch * vocabulary):
        g = _scatter(tokens, h[..., features], each, vocabulary).flatten(1)
        K = K.addmm_(g, g.T)
    return K

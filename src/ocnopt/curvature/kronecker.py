"""C = A ⊗ C + λI, eq. (kfac): the Gauss-Newton matrix of a layer as a Kronecker product, inverted in its eigenbasis.

A = E[x x^T] over inputs (a bias is an extra input 1), C = E[h̃ h̃^T] over the samples' adjoints at the layer's
output, h̃ = B·h. With ``ekfac`` the eigenvalues Σ_A ⊗ Σ_C are replaced by second moments of the gradient, measured in
the eigenbasis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ocnopt.curvature.base import Curvature, Metric
from ocnopt.layers.base import Adapter, Call
from ocnopt.linalg import full_precision, safe_eigh

if TYPE_CHECKING:
    from ocnopt.bucket import Bucket
    from ocnopt.players import Player

#: inputs and adjoints, or gradients of samples, that are formed at a time, in numbers (4 MiB in float32): the windows
#: of a convolution are many times larger than its input
_CHUNK = 1 << 20
#: a window of a convolution is hardly ever larger
_WINDOW = 64

#: values and vectors
Eigen = tuple[Tensor, Tensor]

#: what a layer keeps from step to step
_STATE = (
    "input_factor", "output_factor", "statistics", "since_refresh", "refreshed_at",
    "input_basis", "output_basis", "eigenvalues",
)  # fmt: skip


@dataclass
class KroneckerBlock:
    """C of one layer: U_C (S + λ) U_A^T, ``U_A: [g, a, a]``, ``U_C: [g, c, c]``, ``S: [g, c, a]``."""

    module: nn.Module
    adapter: Adapter
    names: tuple[str, ...]
    U_A: Tensor
    U_C: Tensor
    S: Tensor
    damping: float

    def solve(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        V = self.adapter.to_matrix(self.module, dict(zip(self.names, tensors, strict=True)))
        V = self._divided(self.U_C.mT @ V @ self.U_A)
        back = self.adapter.from_matrix(self.module, self.U_C @ V @ self.U_A.mT)
        return [back[n] for n in self.names]

    def _divided(self, V: Tensor) -> Tensor:
        if self.damping:
            return V / (self.S + self.damping)
        seen = self.S.amax() * torch.finfo(self.S.dtype).eps < self.S  # without damping a pseudo-inverse, eq. (kfac-u)
        return torch.where(seen, V / self.S, 0)


@dataclass
class KroneckerMetric(Metric):
    blocks: list[KroneckerBlock]

    def solve(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        todo, out = list(vectors), []
        with full_precision():
            for block in self.blocks:
                mine, todo = todo[: len(block.names)], todo[len(block.names) :]
                out += block.solve(mine)
        return out

    def select(self, parameters: Sequence[int]) -> KroneckerMetric:
        wanted, chosen, first = set(parameters), [], 0
        for block in self.blocks:
            if first in wanted:
                chosen.append(block)
            first += len(block.names)
        return KroneckerMetric(chosen)


class Kronecker(Curvature):
    name = "kronecker"
    needs_model = True

    def measure(self, bucket: Bucket, a: Tensor | None) -> KroneckerMetric:
        with full_precision():
            states = (bucket.state_of(i) for i in range(len(bucket.players)))
            return KroneckerMetric([self._block(bucket, p, s, a) for p, s in zip(bucket.players, states, strict=True)])

    def _block(self, bucket: Bucket, player: Player, state: dict[str, Any], a: Tensor | None) -> KroneckerBlock:
        assert player.adapter is not None
        assert player.module is not None
        if bucket.calls[id(player)] and self.due(state, bucket.group, player.inside):
            self._learn(bucket, player, state, a)
        else:  # the step counts all the same
            state["statistics"] += bucket.ok
            state["since_refresh"] += 1
        basis = (state["input_basis"], state["output_basis"], state["eigenvalues"])
        return KroneckerBlock(player.module, player.adapter, player.own_names, *basis, bucket.group["damping"])

    def due(self, state: Mapping[str, Any], group: Mapping[str, Any], inside: bool) -> bool:
        if not self.ready(state):
            return True
        steps: int = state["since_refresh"] + 1
        return steps >= group["refresh_every"] or (not inside and steps % group["factor_every"] == 0)

    def ready(self, state: Mapping[str, Any]) -> bool:
        return "input_basis" in state

    def _learn(self, bucket: Bucket, player: Player, state: dict[str, Any], a: Tensor | None) -> None:
        passes = _inputs(bucket, player, a)
        x, h = passes[0].like
        if "input_factor" not in state or state["input_factor"].shape[1] != x.shape[3]:
            for key in _STATE:  # a block that lost or gained its bias starts anew
                state.pop(key, None)
            state["input_factor"] = x.new_zeros(x.shape[1], x.shape[3], x.shape[3])
            state["output_factor"] = h.new_zeros(h.shape[1], h.shape[3], h.shape[3])
            state["statistics"] = x.new_zeros(())  # how many are in the factors
            state["since_refresh"] = 0
        samples, positions = sum(p.batch for p in passes), sum(p.batch * p.positions for p in passes)
        ok = bucket.ok if samples else torch.zeros_like(bucket.ok)  # a bad or empty batch changes nothing
        weight = (1 - bucket.group["factor_decay"] * (state["statistics"] > 0).to(ok)) * ok
        A, C = torch.zeros_like(state["input_factor"]), torch.zeros_like(state["output_factor"])
        for x, h in (part for p in passes for part in p):
            A, C = A + _outer(x), C + _outer(h)
        state["input_factor"].lerp_(A / max(samples, 1), weight)
        state["output_factor"].lerp_(C / (positions or 1), weight)
        state["statistics"] += ok
        self._refresh_if_due(bucket, state, ok)
        if bucket.group["ekfac"]:
            basis = state["input_basis"], state["output_basis"]
            moments = sum(_squares(x, h, *basis) for p in passes for x, h in p)
            state["eigenvalues"].lerp_(moments / max(samples, 1), weight)

    def _refresh_if_due(self, bucket: Bucket, state: dict[str, Any], ok: Tensor) -> None:
        """Renew the eigenbasis every ``refresh_every`` steps; a decomposition that fails leaves the old one."""
        every: int = bucket.group["refresh_every"]
        state["since_refresh"] += 1
        if "input_basis" in state and state["since_refresh"] < every:
            return
        if bool(ok):  # the first look at the device since the last refresh: which of the steps have counted?
            age = int(state["statistics"]) - state.get("refreshed_at", -every)
            if "input_basis" in state and age < every:
                state["since_refresh"] = age
                return
            A, C = safe_eigh(state["input_factor"]), safe_eigh(state["output_factor"])
            if A is not None and C is not None:
                state["eigenvalues"] = self._in_new_basis(bucket, state, A, C)
                state["input_basis"], state["output_basis"] = A[1], C[1]
                state["refreshed_at"], state["since_refresh"] = int(state["statistics"]), 0
                return
            bucket.failed_refreshes += 1
        if "input_basis" not in state:  # nothing to keep: the diagonals of the factors, in coordinates as they are
            state["input_basis"], state["output_basis"] = _eye(state["input_factor"]), _eye(state["output_factor"])
            diagonals = (state[k].diagonal(dim1=1, dim2=2) for k in ("output_factor", "input_factor"))
            c, d = (v.nan_to_num(0.0, 0.0, 0.0).clamp_min(0) for v in diagonals)
            state["eigenvalues"] = c[:, :, None] * d[:, None, :]
        state["since_refresh"] = every  # try again at the next step

    @staticmethod
    def _in_new_basis(bucket: Bucket, state: dict[str, Any], A: Eigen, C: Eigen) -> Tensor:
        """Σ_A ⊗ Σ_C. The averages of EKFAC go on instead: the diagonal of U S U^T, seen from the new basis. (One
        mini-batch would be a poor start: directions it does not see would have no curvature until the next.)
        """
        if not bucket.group["ekfac"] or "input_basis" not in state:
            return C[0][:, :, None] * A[0][:, None, :]
        S: Tensor = state["eigenvalues"]
        S = (C[1].mT @ state["output_basis"]).square() @ S @ (state["input_basis"].mT @ A[1]).square()
        return S


class Inputs:
    """Inputs x and per-sample adjoints h̃ = B·h, ``[batch, blocks, shared, features]``, of one forward pass, in as many
    pieces as it takes.

    A module used several times in one pass has more shared positions. Calls that share one solve in continuous time
    make ∫x x^T dt and ∫h̃ h̃^T dt of it: each is weighted by its duration, and all together they are one use.
    """

    def __init__(self, adapter: Adapter, calls: Sequence[Call], ok: Tensor, scale: float) -> None:
        self.adapter, self.calls, self.ok, self.scale = adapter, calls, ok, scale
        self.batch, self.positions, self.step = calls[0].batch, 0.0, calls[0].batch
        self._whole: tuple[Tensor, Tensor] | None = None
        held = sum(call.x.numel() + call.h.numel() for call in calls)
        small = held * _WINDOW <= _CHUNK
        self.like = self._part(0, self.batch if small else 1)  # some samples
        if not small:
            piece = max(_CHUNK, held // len(calls))  # as much as a call holds anyway: no linear layer is cut up
            self.step = max(1, piece // max(1, sum(v.numel() for v in self.like)))
        if self.step >= self.batch:
            self._whole = self.like if small else self._part(0, self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._whole is not None:
            yield self._whole
            return
        for i in range(0, self.batch, self.step):
            yield self._part(i, i + self.step)

    def _part(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        uses = [self.adapter.kronecker_inputs(call.rows(start, end)) for call in self.calls]
        self.positions = sum(call.share * use.h.shape[2] for call, use in zip(self.calls, uses, strict=True))
        roots = [math.sqrt(call.duration) for call in self.calls]
        x = torch.cat([_scaled(use.x, root) for use, root in zip(uses, roots, strict=True)], 2)
        h = torch.cat([_scaled(use.h, root) for use, root in zip(uses, roots, strict=True)], 2)
        return torch.where(self.ok, x, 0), torch.where(self.ok, h, 0) * self.scale


def _inputs(bucket: Bucket, player: Player, a: Tensor | None) -> list[Inputs]:
    """By forward pass."""
    assert player.adapter is not None
    passes = bucket.calls[id(player)]
    samples = sum(calls[0].batch for _, calls in passes)
    if a is not None:
        passes = [(part, [call.weighted(part.expand(a)) for call in calls]) for part, calls in passes]
    return [Inputs(player.adapter, calls, bucket.ok.bool(), samples) for _, calls in passes]


def _scaled(v: Tensor, factor: float) -> Tensor:
    return v if factor == 1.0 else v * factor


def _outer(v: Tensor) -> Tensor:
    """Σ over batch and shared positions of v v^T, ``[blocks, n, n]``."""
    flat = v.transpose(0, 1).flatten(1, 2)
    return flat.mT @ flat


def _squares(x: Tensor, h: Tensor, U_A: Tensor, U_C: Tensor) -> Tensor:
    """Σ_i (U_C^T Σ_t h_it x_it^T U_A)², ``[blocks, c, a]``: squared gradients of samples in the eigenbasis."""
    B, g, T, a = x.shape
    c = h.shape[3]
    if T == 1:  # the square of a product is the product of squares
        return torch.einsum("bgtc,bgta->gca", (h @ U_C).square(), (x @ U_A).square())
    total = x.new_zeros(g, c, a)
    step = max(8, _CHUNK // max(1, g * c * a))
    for i in range(0, B, step):  # a sample's gradient has c rows to rotate, its inputs have T
        total += (U_C.mT @ (h[i : i + step].mT @ x[i : i + step]) @ U_A).square().sum(0)
    return total


def _eye(factor: Tensor) -> Tensor:
    return torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand_as(factor).clone()

"""EKFAC: eigenvalue-corrected Kronecker factorisation (George et al. 2018).

The Fisher block of a layer with inputs x and output adjoints h is approximated as U diag(s) U^T with U = U_C
⊗ U_A, where U_A and U_C are the eigenvectors of A = E[x x^T] and C = E[h h^T], and s the second moments of
the per-sample gradients *in that basis*. The basis is costly and changes slowly: it is refreshed every
``refresh_every`` steps. The scalings s are cheap and are re-estimated at every step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from ocnopt.baselines.chain import require
from ocnopt.linalg import safe_eigh
from ocnopt.phases import CURVATURE, UPDATE

KroneckerLayer = nn.Linear | nn.Conv2d

# Per-sample gradients of layers with shared positions are formed for as many samples at a time as fit in this
# many numbers.
_CHUNK = 2**24


@dataclass(frozen=True)
class Record:
    """Inputs x and output adjoints h of a layer in one pass, both ``[batch, shared, features]``."""

    x: Tensor
    h: Tensor


class EKFAC(Optimizer):
    """EKFAC for ``nn.Linear`` and ungrouped ``nn.Conv2d``, SGD with momentum for every other parameter.

    A drop-in torch optimizer: ``loss.backward(); opt.step()``. The loss must be a mean over the batch and
    samples must be dimension 0. Fisher statistics use the gradients of the training loss itself, as the
    authors' implementation does. Momentum and weight decay act on the preconditioned gradient, also as there.
    Weight and bias of a layer are preconditioned together.

    Args:
        params: parameters or groups; each group may set ``lr``, ``momentum``, ``weight_decay`` and
            ``damping`` of its own.
        lr: learning rate η.
        model: the network whose layers are watched (hooks are registered; ``detach`` removes them).
        momentum: μ of heavy-ball momentum, as in ``torch.optim.SGD``.
        weight_decay: γ, added to the preconditioned gradient.
        damping: λ, added to s before division.
        factor_decay: decay of the running averages of A, C and s; 0 means the current batch only.
        refresh_every: steps between two eigendecompositions; the first is at the first step.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        *,
        model: nn.Module,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        damping: float = 1e-2,
        factor_decay: float = 0.95,
        refresh_every: int = 100,
    ) -> None:
        require(lr >= 0, "lr", "at least 0", lr)
        require(0 <= momentum < 1, "momentum", "in [0, 1)", momentum)
        require(weight_decay >= 0, "weight_decay", "at least 0", weight_decay)
        require(damping > 0, "damping", "positive", damping)
        require(0 <= factor_decay < 1, "factor_decay", "in [0, 1)", factor_decay)
        require(refresh_every >= 1, "refresh_every", "at least 1", refresh_every)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "damping": damping}
        super().__init__(params, {**defaults, "factor_decay": factor_decay, "refresh_every": refresh_every})
        self._pass = 0
        # layer -> pass -> (x, h) of each execution, raw: patches are only formed in step, one layer at a time
        self._tape: dict[str, dict[int, list[tuple[Tensor, Tensor]]]] = {}
        self._layers: dict[str, KroneckerLayer] = {}
        self._handles = [model.register_forward_pre_hook(self._count_pass)]
        trained = {p for group in self.param_groups for p in group["params"]}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Conv2d) and module.weight in trained and _is_kronecker(module):
                _refuse_half_precision(name, module)
                self._refuse_tied(name, module)
                self._layers[name] = module
                self._handles.append(module.register_forward_hook(self._recorder(name)))

    def _refuse_tied(self, name: str, module: KroneckerLayer) -> None:
        for other, layer in self._layers.items():
            if layer.weight is module.weight:
                raise ValueError(
                    f"model ties the weights of layers {other!r} and {name!r}: EKFAC cannot factorise them"
                )

    def detach(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients and what was recorded with them."""
        super().zero_grad(set_to_none)
        self._tape.clear()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        preconditioned: dict[Tensor, Tensor] = {}
        for name, layer in self._layers.items():
            if layer.weight.grad is not None:
                preconditioned.update(self._precondition(name, layer, group_of))
        self._tape.clear()
        for p, group in group_of.items():
            if p.grad is not None:
                self._descend(p, preconditioned.get(p, p.grad), group)
        return loss

    @UPDATE
    def _descend(self, p: Tensor, direction: Tensor, group: dict[str, Any]) -> None:
        """SGD with momentum along ``direction``, as torch's SGD does along the gradient."""
        if group["weight_decay"] != 0:
            direction = direction.add(p, alpha=group["weight_decay"])
        if group["momentum"] != 0:
            state = self.state[p]
            if "momentum_buffer" in state:
                state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
            else:
                state["momentum_buffer"] = direction.clone()
            direction = state["momentum_buffer"]
        p.add_(direction, alpha=-group["lr"])

    @UPDATE
    def _precondition(
        self, name: str, layer: KroneckerLayer, group_of: dict[Tensor, dict[str, Any]]
    ) -> dict[Tensor, Tensor]:
        """U (U^T G U / (s + λ)) U^T for the gradient matrix G ``[c, a]``; a bias is its last column."""
        state, group = self.state[layer.weight], group_of[layer.weight]
        with_bias = layer.bias is not None and layer.bias in group_of
        if name in self._tape:
            passes = list(self._tape[name].values())
            batch = sum(calls[0][0].shape[0] for calls in passes)
            records = [_joined(layer, calls, with_bias, batch) for calls in passes]
            self._update_statistics(name, state, group, records, batch)
        if "s" not in state:
            raise RuntimeError(
                f"EKFAC has seen no backward pass through layer {name!r}: is model the module that computed the loss?"
            )
        U_A, U_C = state["U_A"], state["U_C"]
        G = _gradient_matrix(layer, with_bias)
        N = U_C @ ((U_C.T @ G @ U_A) / (state["s"] + group["damping"])) @ U_A.T
        if layer.bias is None or not with_bias:
            return {layer.weight: N.view_as(layer.weight)}
        return {layer.weight: N[:, :-1].reshape(layer.weight.shape), layer.bias: N[:, -1].clone()}

    @CURVATURE
    def _update_statistics(
        self, name: str, state: dict[str, Any], group: dict[str, Any], records: list[Record], batch: int
    ) -> None:
        """Running averages of A and C; the basis where one is due; s, carried over to each new basis."""
        X = torch.cat([r.x.flatten(0, 1) for r in records])
        H = torch.cat([r.h.flatten(0, 1) for r in records])
        decay = group["factor_decay"]
        _average(state, "A", X.T @ X / batch, decay)
        _average(state, "C", H.T @ H / H.shape[0], decay)
        step = state.get("step", 0)
        if step % group["refresh_every"] == 0:
            _refresh_basis(name, state)
        squares = torch.stack([_squares_in_basis(r, state["U_A"], state["U_C"]) for r in records]).sum(0)
        _average(state, "s", squares / batch, decay)
        state["step"] = step + 1

    def _count_pass(self, module: nn.Module, args: Any) -> None:
        self._pass += 1

    def _recorder(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def record_forward(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if not output.requires_grad:
                return
            number, x = self._pass, args[0].detach()

            # Written when the adjoint arrives: a forward pass without a backward leaves nothing behind.
            def record_backward(h: Tensor) -> None:
                self._tape.setdefault(name, {}).setdefault(number, []).append((x, h.detach()))

            output.register_hook(record_backward)

        return record_forward


def _is_kronecker(module: KroneckerLayer) -> bool:
    return isinstance(module, nn.Linear) or module.groups == 1


def _refuse_half_precision(name: str, module: KroneckerLayer) -> None:
    if module.weight.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"params must be float32 or float64 for EKFAC; layer {name!r} is {module.weight.dtype}")


def _gradient_matrix(layer: KroneckerLayer, with_bias: bool) -> Tensor:
    assert layer.weight.grad is not None
    G = layer.weight.grad.flatten(1)
    if layer.bias is None or not with_bias:
        return G
    bias_grad = layer.bias.grad if layer.bias.grad is not None else torch.zeros_like(layer.bias)
    return torch.cat([G, bias_grad[:, None]], dim=1)


def _as_record(module: KroneckerLayer, x: Tensor, h: Tensor) -> Record:
    if isinstance(module, nn.Conv2d):
        # Padding first, in the module's own way, then every receptive field as one row of features.
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padded = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
        patches = F.unfold(padded, module.kernel_size, dilation=module.dilation, stride=module.stride)
        return Record(patches.mT, h.flatten(2).mT)
    if x.dim() < 2:
        raise ValueError("inputs must have the samples as dimension 0; a Linear layer received a single vector")
    return Record(x.reshape(x.shape[0], -1, x.shape[-1]), h.reshape(h.shape[0], -1, h.shape[-1]))


def _joined(layer: KroneckerLayer, calls: list[tuple[Tensor, Tensor]], with_bias: bool, batch: int) -> Record:
    """All executions in one pass: the same samples at more positions. h in the scale of a single sample's
    loss.
    """
    records = [_as_record(layer, x, h) for x, h in calls]
    x = torch.cat([r.x for r in records], dim=1)
    h = torch.cat([r.h for r in records], dim=1) * batch
    if with_bias:
        x = torch.cat([x, x.new_ones(*x.shape[:2], 1)], dim=2)
    return Record(x, h)


def _squares_in_basis(record: Record, U_A: Tensor, U_C: Tensor) -> Tensor:
    """Σ_i (U_C^T g_i U_A)² with g_i = Σ_t h_it x_it^T, ``[c, a]``."""
    x, h = record.x @ U_A, record.h @ U_C
    if x.shape[1] == 1:  # the square of an outer product is the outer product of the squares
        return h[:, 0].square().T @ x[:, 0].square()
    chunk = max(1, _CHUNK // (x.shape[2] * h.shape[2]))
    total = x.new_zeros(h.shape[2], x.shape[2])
    for x_part, h_part in zip(x.split(chunk), h.split(chunk), strict=True):
        total += (h_part.mT @ x_part).square_().sum(0)
    return total


def _refresh_basis(name: str, state: dict[str, Any]) -> None:
    """New bases; s goes on as the diagonal of U diag(s) U^T in the new one."""
    for factor in ("A", "C"):
        eigen = safe_eigh(state[factor])
        if eigen is not None:
            old, state[f"U_{factor}"] = state.get(f"U_{factor}"), eigen[1]
            if old is not None and "s" in state:
                turned = (eigen[1].T @ old).square()
                state["s"] = turned @ state["s"] if factor == "C" else state["s"] @ turned.T
            continue
        warnings.warn(f"EKFAC keeps the old basis of layer {name!r}: factor {factor} is not finite", stacklevel=2)
        state.setdefault(f"U_{factor}", torch.eye(len(state[factor])).to(state[factor]))


def _average(state: dict[str, Any], key: str, new: Tensor, decay: float) -> None:
    state[key] = state[key].lerp(new, 1 - decay) if key in state and decay > 0 else new

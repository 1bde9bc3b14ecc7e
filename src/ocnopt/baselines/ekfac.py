"""EKFAC: eigenvalue-corrected Kronecker factorisation (George et al. 2018).

The Fisher block of a layer with inputs x and output adjoints h is approximated as U diag(s) U^T with U = U_C
⊗ U_A, where U_A and U_C are the eigenvectors of A = E[x x^T] and C = E[h h^T], and s the second moments of
the per-sample gradients *in that basis*. The basis is costly and changes slowly: it is refreshed every
``refresh_every`` steps. The scalings s are cheap and are re-estimated at every step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from ocnopt import layers
from ocnopt.baselines.chain import require
from ocnopt.curvature.eigen import Inverse, inputs_seen, turned
from ocnopt.curvature.inputs import Inputs, Sums, squares_over
from ocnopt.layers import Adapter, Call
from ocnopt.linalg import safe_eigh
from ocnopt.phases import CURVATURE, UPDATE

KroneckerLayer = nn.Linear | nn.Conv2d


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
                self._refuse_half_trained(name, module, trained)
                self._layers[name] = module
                self._handles.append(module.register_forward_hook(self._recorder(name)))

    def _refuse_tied(self, name: str, module: KroneckerLayer) -> None:
        for other, layer in self._layers.items():
            if layer.weight is module.weight:
                raise ValueError(
                    f"model ties the weights of layers {other!r} and {name!r}: EKFAC cannot factorise them"
                )

    @staticmethod
    def _refuse_half_trained(name: str, module: KroneckerLayer, trained: set[Tensor]) -> None:
        if module.bias is not None and module.bias.requires_grad and module.bias not in trained:
            raise ValueError(f"params must have the bias of layer {name!r} as well, or freeze it: it shares a block")

    def detach(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients and what was recorded with them."""
        super().zero_grad(set_to_none)
        self._tape.clear()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """A copy of it: averages go on in place."""
        super().load_state_dict(deepcopy(state_dict))

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
        for group in self.param_groups:
            moving = {p: preconditioned.get(p, p.grad) for p in group["params"] if p.grad is not None}
            if moving:
                self._descend(list(moving), list(moving.values()), group)
        return loss

    @UPDATE
    def _descend(self, params: list[Tensor], directions: list[Tensor], group: dict[str, Any]) -> None:
        """SGD with momentum along the directions, as torch's SGD does along the gradients."""
        if group["weight_decay"] != 0:
            directions = list(torch._foreach_add(directions, params, alpha=group["weight_decay"]))
        if group["momentum"] != 0:
            for p in params:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffers = [self.state[p]["momentum_buffer"] for p in params]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, directions)
            directions = buffers
        torch._foreach_add_(params, directions, alpha=-group["lr"])

    @UPDATE
    def _precondition(
        self, name: str, layer: KroneckerLayer, group_of: dict[Tensor, dict[str, Any]]
    ) -> dict[Tensor, Tensor]:
        """U (U^T G U / (s + λ)) U^T for the gradient matrix G ``[c, a]``; a bias is its last column."""
        state, group, adapter = self.state[layer.weight], group_of[layer.weight], _adapter(layer)
        if name in self._tape:
            calls = [[Call(layer, (x,), {}, h) for x, h in each] for each in self._tape[name].values()]
            passes = [Inputs(adapter, each, keep=True) for each in calls]
            self._update_statistics(name, state, group, passes, _gradient_matrix(layer, adapter))
        if "s" not in state:
            raise RuntimeError(
                f"EKFAC has seen no backward pass through layer {name!r}: is model the module that computed the loss?"
            )
        G, s, U_A, U_C = _gradient_matrix(layer, adapter)[None], *(state[key][None] for key in ("s", "U_A", "U_C"))
        N = Inverse(s, U_A, U_C, group["damping"], inputs_seen(state["A"][None], s, U_A))(G)
        own = adapter.parameters(layer)
        return {own[key]: step for key, step in adapter.from_matrix(layer, N).items()}

    @CURVATURE
    def _update_statistics(
        self, name: str, state: dict[str, Any], group: dict[str, Any], passes: list[Inputs], like: Tensor
    ) -> None:
        """Running averages of A and C; the basis where one is due; s, carried over to each new basis. ``like``: G."""
        if "A" in state and len(state["A"]) != like.shape[1]:  # a bias was frozen or thawed
            for key in ("A", "C", "U_A", "U_C", "s", "step"):
                state.pop(key, None)
        c, a = like.shape
        sums, decay = Sums.over(passes, like.new_empty(1, a, a), like.new_empty(1, c, c)), group["factor_decay"]
        for key, value, share in zip("AC", (sums.A, sums.C), sums.shares, strict=True):
            _average(state, key, value[0], float(share), decay)
        step = state.get("step", 0)
        if step % group["refresh_every"] == 0:
            _refresh_basis(name, state)
        U_A, U_C = state["U_A"][None], state["U_C"][None]
        seen = inputs_seen(state["A"][None], state["s"][None], U_A) if "s" in state else None
        squares = squares_over(passes, like[None], U_A, U_C, seen)
        _average(state, "s", squares[0], float(sums.samples), decay)
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


def _adapter(layer: KroneckerLayer) -> Adapter:
    adapter, why = layers.find(layer)
    if adapter is None:
        raise ValueError(f"EKFAC cannot factorise a layer of model: {why}")
    return adapter


def _gradient_matrix(layer: KroneckerLayer, adapter: Adapter) -> Tensor:
    own = adapter.parameters(layer)
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in own.items()}
    return adapter.to_matrix(layer, gradients)[0]


def _refresh_basis(name: str, state: dict[str, Any]) -> None:
    """New bases; s goes on as the diagonal of U diag(s) U^T in the new one."""
    before = {factor: state.get(f"U_{factor}") for factor in ("A", "C")}
    for factor in ("A", "C"):
        eigen = safe_eigh(state[factor])
        if eigen is not None:
            state[f"U_{factor}"] = eigen[1]
            continue
        warnings.warn(f"EKFAC keeps the old basis of layer {name!r}: factor {factor} is not finite", stacklevel=2)
        state.setdefault(f"U_{factor}", torch.eye(len(state[factor])).to(state[factor]))
    if before["A"] is not None and before["C"] is not None:
        state["s"] = turned(state["s"], (before["A"], before["C"]), (state["U_A"], state["U_C"]))


def _average(state: dict[str, Any], key: str, value: Tensor, share: float, decay: float) -> None:
    """Of value · share."""
    if key in state and decay > 0:
        state[key].mul_(decay).add_(value, alpha=(1 - decay) * share)
    else:
        state[key] = value * share

"""The adapter that fits every module: run it again and pull the adjoint of each group back through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ocnopt.environment import in_mode
from ocnopt.groups import Groups
from ocnopt.layers.base import Adapter, Call, compute_dtype
from ocnopt.layers.outer import pieces


class Recompute(Adapter):
    """Group gradients of any module, at the price of its forward pass and one backward pass per group.

    The module runs once more on the whole batch, as it ran: same random numbers, mode, and autocast; its
    buffers stay as they are. Then the adjoint, masked so that only the rows of one group are left, is pulled
    back to the parameters. If samples are coupled, a group's gradient is what its rows of the adjoint cause.

    Args:
        children: also cover the parameters of submodules, under their dotted names. Only for a module that
            uses them without calling the submodule, as ``MultiheadAttention`` does; else they count twice.
        random: whether ``forward`` draws random numbers. If not, their state need not be kept.
    """

    def __init__(self, *, children: bool = False, random: bool = True) -> None:
        self.children = children
        self.random = random

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        if not self.children:
            return super().parameters(module)
        return {name: p for name, p in module.named_parameters() if p.requires_grad}

    def needs_rng(self, module: nn.Module) -> bool:
        return self.random

    def group_gradients(self, call: Call, groups: Groups) -> dict[str, Tensor]:
        leaves = {name: p.detach().requires_grad_() for name, p in self.parameters(call.module).items()}
        if not leaves:
            return {}
        self.check_rng(call)
        args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (call.args, dict(call.kwargs)))
        output = repeat(call, leaves, args, kwargs)
        gradients = _pullbacks(output, list(leaves.values()), call.h.to(output.dtype), groups)
        return {name: g.to(compute_dtype(g.dtype)) for name, g in zip(leaves, gradients, strict=True)}

    def check_rng(self, call: Call) -> None:
        if call.rng is None and self.needs_rng(call.module):
            raise ValueError(
                f"call.rng must be kept for {type(call.module).__name__}, whose forward draws random numbers"
            )


def repeat(call: Call, replaced: Mapping[str, Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Run the module of a call again, under grad mode, and return the first tensor of its output.

    ``replaced`` are parameters to use instead of the module's own, by name. The module's own hooks do not
    run, they are about the call that already was.
    """
    module = call.module
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and not t.is_inference()]
    versions = [t._version for t in inputs]
    state = {f"module.{name}": buffer.clone() for name, buffer in module.named_buffers()}
    state |= {f"module.{name}": tensor for name, tensor in replaced.items()}
    with ExitStack() as stack:
        if call.rng is not None:
            stack.enter_context(call.rng.restored())
        stack.enter_context(in_mode(module, bool(call.training)))
        stack.enter_context(precision(call))
        stack.enter_context(torch.enable_grad())
        output = _first(functional_call(_Forward(module), state, tuple(args), dict(kwargs)))
    if versions != [t._version for t in inputs]:
        raise ValueError(f"{type(module).__name__} changes its input in place, so it cannot be run again")
    return output


def precision(call: Call) -> torch.autocast:
    """Autocast as it was during the call."""
    return torch.autocast(call.h.device.type, dtype=call.autocast, enabled=call.autocast is not None)


class _Forward(nn.Module):
    """A module's ``forward`` without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def _first(output: Any) -> Tensor:
    tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
    if not tensors:
        raise TypeError(f"a module with an adapter must return a tensor, got {type(output).__name__}")
    return tensors[0]


def _pullbacks(output: Tensor, leaves: Sequence[Tensor], h: Tensor, groups: Groups) -> list[Tensor]:
    """For each leaf ``[r, *leaf.shape]``."""
    if not output.requires_grad:  # no leaf was used
        return [leaf.new_zeros(groups.rank, *leaf.shape) for leaf in leaves]
    if groups.rank == 1:
        return [g.unsqueeze(0) for g in _gradients(output, leaves, h)]
    rows = groups.of_rows(h.device)
    of_group = torch.arange(groups.rank, device=h.device).unsqueeze(1) == rows
    of_group = of_group.view(*of_group.shape, *[1] * (h.dim() - 1))
    parts = []
    for some in pieces(groups.rank, h.numel()):
        # Chosen, not multiplied: 0 · inf in one group's adjoint would spoil all the others.
        masked = torch.where(of_group[some], h, 0)
        try:
            parts.append(_gradients(output, leaves, masked, batched=True))
        except RuntimeError:  # an operation without a rule for batches; a true error comes again below
            one_by_one = [_gradients(output, leaves, m) for m in masked]
            parts.append([torch.stack(g) for g in zip(*one_by_one, strict=True)])
    return [torch.cat(g) for g in zip(*parts, strict=True)]


def _gradients(output: Tensor, leaves: Sequence[Tensor], h: Tensor, batched: bool = False) -> list[Tensor]:
    gradients: Sequence[Tensor | None] = torch.autograd.grad(
        output, leaves, h, retain_graph=True, is_grads_batched=batched, allow_unused=True
    )
    shapes = [(*h.shape[:batched], *leaf.shape) for leaf in leaves]
    return [
        leaf.new_zeros(shape) if g is None else g  # None: the leaf was not used
        for g, leaf, shape in zip(gradients, leaves, shapes, strict=True)
    ]

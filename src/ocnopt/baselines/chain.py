"""A network as a discrete-time control system: stages x_{k+1} = f_k(x_k, θ_k), one after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Stage:
    """f_k: one parametrised module and the parameter-free modules that follow it."""

    name: str
    module: nn.Sequential


@dataclass(frozen=True)
class Trajectory:
    """One forward and backward pass: the states x_0..x_K, their adjoints ∂L/∂x_0..∂L/∂x_K, and the loss L."""

    states: list[Tensor]
    adjoints: list[Tensor]
    loss: Tensor


@dataclass(frozen=True)
class Chain:
    """``prefix`` (parameter-free: flattening, say) makes x_0 of the model's input; the stages do the rest."""

    prefix: nn.Sequential
    stages: list[Stage]

    def parameters(self) -> Iterator[nn.Parameter]:
        for stage in self.stages:
            yield from stage.module.parameters()

    def trajectory(self, inputs: Tensor, target: Tensor, loss_fn: LossFn) -> Trajectory:
        with torch.enable_grad():
            x = self.prefix(inputs).detach()
            if not x.is_floating_point():
                raise ValueError(f"inputs must be floating-point: the state is differentiated; got {x.dtype}")
            states = [x.requires_grad_()]
            for stage in self.stages:
                states.append(stage.module(states[-1]))
            loss = loss_fn(states[-1], target)
            if loss.dim() != 0:
                raise ValueError(
                    f"loss_fn must return a scalar, the mean over the batch; got shape {tuple(loss.shape)}"
                )
            adjoints = torch.autograd.grad(loss, states)
        return Trajectory([x.detach() for x in states], list(adjoints), loss.detach())


def find_chain(model: nn.Module) -> Chain:
    """The stages of ``model``: an ``nn.Sequential``, nested or not, whose entries may be layers or whole
    blocks.

    What branches inside an entry (a residual block) is one stage. Anything whose order of execution cannot be
    read off, and anything that would not repeat itself when evaluated again, is refused.
    """
    prefix: list[nn.Module] = []
    stages: list[tuple[str, list[nn.Module]]] = []
    for name, module in _entries(model, ""):
        if next(module.parameters(), None) is not None:
            stages.append((name, [module]))
        else:
            (stages[-1][1] if stages else prefix).append(module)
    if not stages:
        raise ValueError("model has no parameters to train")
    chain = Chain(nn.Sequential(*prefix), [Stage(name, nn.Sequential(*modules)) for name, modules in stages])
    _refuse_shared_parameters(chain)
    _refuse_dropout(model)
    return chain


def _entries(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        for child_name, child in zip(module._modules, module, strict=True):  # with repeats, unlike named_children
            yield from _entries(child, f"{name}.{child_name}" if name else child_name)
    elif name or next(module.children(), None) is None:
        yield name or type(module).__name__, module
    else:
        raise ValueError(
            f"model must be a chain of layers (an nn.Sequential, nested or not); the order in which "
            f"{type(module).__name__} runs its layers cannot be read off"
        )


def _refuse_shared_parameters(chain: Chain) -> None:
    owner: dict[nn.Parameter, str] = {}
    for stage in chain.stages:
        for parameter in stage.module.parameters():
            if owner.setdefault(parameter, stage.name) != stage.name:
                raise ValueError(
                    f"model shares a parameter between layers {owner[parameter]!r} and {stage.name!r}; "
                    f"each stage needs parameters of its own"
                )


def _refuse_dropout(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ValueError(
                f"model has dropout at layer {name!r}, but layers are evaluated several times per step "
                f"and must repeat themselves"
            )


class BatchOptimizer(Optimizer, ABC):
    """An optimizer that solves the control problem of one mini-batch: initial state ``inputs``, terminal cost
    ``loss_fn``.

    ``step`` runs the network itself, as often as it needs; there is no ``backward()`` to call and ``p.grad``
    is not touched::

        for x, y in loader:
            loss = opt.step(x, y)        # the loss before the step

    ``loss_fn(output, target)`` is a mean over the batch. One parameter group only; ``state_dict`` is that of
    torch.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any], *, model: nn.Module, loss_fn: LossFn) -> None:
        super().__init__(params, defaults)
        if len(self.param_groups) != 1:
            raise ValueError(f"params must be one group for {type(self).__name__}; got {len(self.param_groups)}")
        self.loss_fn = loss_fn
        self.chain = find_chain(model)
        known = set(self.chain.parameters())
        if any(p not in known for p in self.param_groups[0]["params"]):
            raise ValueError("params holds a tensor that is not a parameter of model")

    @abstractmethod
    def step(self, inputs: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]  # a batch, not a closure
        """One step on one mini-batch; returns the loss before it."""


def require(condition: bool, name: str, rule: str, value: object) -> None:
    """The one form of complaint about an argument."""
    if not condition:
        raise ValueError(f"{name} must be {rule}; got {value!r}")

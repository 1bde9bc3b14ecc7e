"""Every optimizer that the lab compares, by name.

``build(choice, model)`` makes one. Options are those of the optimizer itself; a name, a type or a value that it does
not have is an error that names the key, before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ocnopt import OCNOpt
from ocnopt.arguments import why_not_together
from ocnopt.baselines import DDP, EKFAC, EMSA
from ocnopt.lab.schema import ConfigError, Fraction, NonNegative, Option, Positive, Scalar, options_of, read_options


class MuonAdamW:
    """torch's Muon for matrices, AdamW for everything else, under one learning rate.

    Muon's steps are scaled to those of AdamW (``match_rms_adamw``), which is what makes one rate do for both.
    ``tables`` are matrices that are no linear maps, embeddings that is: AdamW takes them as well.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float,
        weight_decay: float,
        tables: Iterable[Tensor] = (),
    ) -> None:
        every, others = list(params), set(tables)
        matrices = [p for p in every if p.dim() == 2 and p not in others]
        rest = [p for p in every if p.dim() != 2 or p in others]
        self.parts: dict[str, Optimizer] = {}
        if matrices:
            self.parts["muon"] = torch.optim.Muon(
                matrices, lr, weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            )
        if rest:
            self.parts["adamw"] = torch.optim.AdamW(rest, lr, weight_decay=weight_decay)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts.values() for group in part.param_groups]

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts.values():
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


AnyOptimizer = Optimizer | MuonAdamW


def _sgdm(
    model: nn.Module,
    *,
    lr: Positive = 0.05,
    momentum: Fraction = 0.9,
    nesterov: bool = False,
    weight_decay: NonNegative = 0.0,
) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum, weight_decay=weight_decay, nesterov=nesterov)


def _rmsprop(
    model: nn.Module,
    *,
    lr: Positive = 1e-3,
    alpha: Fraction = 0.99,
    momentum: Fraction = 0.0,
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.0,
) -> Optimizer:
    return torch.optim.RMSprop(
        model.parameters(), lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum
    )


def _adam(
    model: nn.Module,
    *,
    lr: Positive = 1e-3,
    beta1: Fraction = 0.9,
    beta2: Fraction = 0.999,
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.0,
) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr, (beta1, beta2), eps, weight_decay)


def _adamw(
    model: nn.Module,
    *,
    lr: Positive = 1e-3,
    beta1: Fraction = 0.9,
    beta2: Fraction = 0.999,
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 1e-2,
) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr, (beta1, beta2), eps, weight_decay)


def _muon(
    model: nn.Module,
    *,
    lr: Positive = 1e-3,
    momentum: Fraction = 0.95,
    weight_decay: NonNegative = 1e-2,
) -> MuonAdamW:
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    return MuonAdamW(model.parameters(), lr, momentum, weight_decay, tables)


@dataclass(frozen=True)
class Kind:
    """One optimizer of the lab: how tables call it, how it is made, and what can be set."""

    title: str
    build: Callable[..., AnyOptimizer]
    options: Mapping[str, Option]
    looks_inside: bool  #: it may want more than ``p.grad``: activations and adjoints of single layers and samples


def _of_function(title: str, build: Callable[..., AnyOptimizer]) -> Kind:
    return Kind(title, build, options_of(build, skip=("model",)), looks_inside=False)


def _of_class(title: str, cls: Callable[..., Optimizer]) -> Kind:
    """An optimizer of this project: it takes the model, and checks its own arguments."""

    def build(model: nn.Module, **options: Any) -> Optimizer:
        return cls(model.parameters(), model=model, **options)

    # what the trainer decides, or the device
    elsewhere = ("params", "model", "loss_fn", "maximize", "accumulate", "process_group", "fused", "graphed")
    options = options_of(cls, skip=elsewhere)
    return Kind(title, build, options, looks_inside=True)


OPTIMIZERS: dict[str, Kind] = {
    "sgdm": _of_function("SGDm", _sgdm),
    "rmsprop": _of_function("RMSprop", _rmsprop),
    "adam": _of_function("Adam", _adam),
    "adamw": _of_function("AdamW", _adamw),
    "muon": _of_function("Muon", _muon),
    "ekfac": _of_class("EKFAC", EKFAC),
    "emsa": _of_class("E-MSA", EMSA),
    "ddp": _of_class("DDP", DDP),
    "ocnopt": _of_class("OCNOpt", OCNOpt),
}


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer by name, with the value of every one of its options."""

    name: str
    options: Mapping[str, Scalar]

    @property
    def kind(self) -> Kind:
        return OPTIMIZERS[self.name]

    @property
    def lr(self) -> float:
        return float(self.options["lr"])

    def with_lr(self, lr: float) -> OptimizerConfig:
        return read_optimizer({**self.table(), "lr": lr}, self.name)

    def label(self) -> str:
        """The name and every option that is not at its default, except the learning rate."""
        changed = [
            f"{key}={value}"
            for key, value in self.options.items()
            if key != "lr" and value != self.kind.options[key].default
        ]
        return " ".join((self.kind.title, *changed))

    def table(self) -> dict[str, Scalar]:
        return {"name": self.name, **self.options}

    def build(self, model: nn.Module) -> AnyOptimizer:
        return self.kind.build(model, **self.options)

    def why_alone(self) -> str | None:
        """Why it cannot share a batch with other processes, or ``None``."""
        if self.name == "ocnopt":
            return why_not_together(self.options)
        return f"{self.kind.title} looks at single layers and samples of the batch" if self.kind.looks_inside else None


def read_optimizer(table: Mapping[str, Any], where: str = "optimizer") -> OptimizerConfig:
    """Read ``{name = "...", lr = ..., ...}``."""
    options = dict(table)
    name = options.pop("name", None)
    kind = find_kind(name, where)
    defaults = {key: option.default for key, option in kind.options.items() if option.default is not MISSING}
    config = OptimizerConfig(name, {**defaults, **read_options(kind.options, options, where)})
    try:  # what only the optimizer itself knows: ranges, and options that exclude each other
        config.build(nn.Sequential(nn.Linear(2, 2)))
    except ValueError as error:
        raise ConfigError(f"{where}.{error}") from None
    return config


def find_kind(name: Any, where: str) -> Kind:
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise ConfigError(f"{where}.name must be one of {', '.join(OPTIMIZERS)}, got {name!r}")
    return OPTIMIZERS[name]

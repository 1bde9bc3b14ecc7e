"""Who plays: parameters that share one metric, where they live in the model and what treats them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ocnopt import layers
from ocnopt.curvature import BY_NAME, Curvature
from ocnopt.hosts import Host
from ocnopt.layers import Adapter

_MAY_DIFFER = ("params", "param_names", "weight_decay")


@dataclass
class Use:
    """A parameter as one module sees it."""

    module_name: str
    module: nn.Module
    own_name: str
    adapter: Adapter | None
    reason: str | None  # why there is no adapter
    host: Host | None = None  # the module that runs it, if the calls are seen from outside: module_name is its name
    path: str = ""  # the module's name inside its host

    @property
    def called(self) -> nn.Module:
        """The module whose calls are watched."""
        return self.module if self.host is None else self.host


@dataclass(eq=False)
class Player:
    """A block of parameters with one metric: a weight, a bias, or both where the Kronecker metric joins them."""

    name: str
    params: list[Tensor]
    groups: list[dict[str, Any]]  # the parameter group of each; they differ in weight decay at most
    curvature: Curvature
    uses: list[list[Use]]  # for each parameter, the modules that hold it
    notes: list[str] = field(default_factory=list)

    @property
    def group(self) -> dict[str, Any]:
        return self.groups[0]

    @property
    def module(self) -> nn.Module | None:
        return self.uses[0][0].module if self.uses[0] else None

    @property
    def adapter(self) -> Adapter | None:
        return self.uses[0][0].adapter if self.uses[0] else None

    @property
    def own_names(self) -> tuple[str, ...]:
        return tuple(use[0].own_name for use in self.uses)

    @property
    def module_names(self) -> list[str]:
        """The modules that hold any of the parameters, without repetition."""
        return list(dict.fromkeys(use.module_name for uses in self.uses for use in uses))

    @property
    def inside(self) -> bool:
        """Is its layer run by a host, which must be asked what the layer saw?"""
        return any(use.host is not None for uses in self.uses for use in uses)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Those that run its layer, by name."""
        return tuple(dict.fromkeys(use.module_name for uses in self.uses for use in uses if use.host is not None))

    def kept(self, states: Mapping[Tensor, dict[str, Any]]) -> Mapping[str, Any]:
        """What its curvature goes on with."""
        state = states.get(self.params[0], {})
        return state if self.curvature.fits(state, self.params) else {}

    def untouched(self, states: Mapping[Tensor, dict[str, Any]]) -> Set[str]:
        """State that the coming step leaves as it is, see :meth:`Curvature.untouched`."""
        return self.curvature.untouched(self.kept(states), self.group, self.inside)

    @property
    def torn(self) -> bool:
        """Would it have the curvature that was asked for, if a single host ran its layer?"""
        if self.curvature.needs_model or not resolve(self.group["curvature"]).needs_model or len(self.hosts) < 2:
            return False
        use = self.uses[0][0]
        names = () if use.adapter is None else use.adapter.kronecker_names(use.module)
        return use.own_name in names

    def alone(self, i: int) -> Player:
        """One of the parameters by itself, which is not a block any more."""
        name, group, uses = f"{self.name}.{self.own_names[i]}", self.groups[i], self.uses[i]
        return Player(name, [self.params[i]], [group], BY_NAME["adaptive"], [uses])

    def why_no_adapter(self) -> str | None:
        """Why no adapter reads the calls of its modules, or ``None`` if one does."""
        for uses in self.uses:
            if not uses:
                return "not a parameter of the attached model"
            for use in uses:
                if use.adapter is None:
                    return use.reason
        return None


def find_uses(model: nn.Module | None) -> dict[int, list[Use]]:
    """``{id(parameter): its uses}``, in the order of ``model.named_modules()``."""
    uses: dict[int, list[Use]] = {}
    if model is None:
        return uses
    inside = _inside_hosts(model)
    claimed: set[tuple[int, int]] = set()  # (module, parameter) pairs that a parent's adapter takes care of
    for name, module in model.named_modules():
        adapter, reason = layers.find(module)
        own = adapter.parameters(module) if adapter else _own_parameters(module)
        for own_name, p in own.items():
            if (id(module), id(p)) in claimed:
                continue
            uses.setdefault(id(p), []).extend(_uses(name, module, own_name, adapter, reason, inside))
            if "." in own_name:
                child = module.get_submodule(own_name.rpartition(".")[0])
                claimed.add((id(child), id(p)))
        if adapter:  # a parameter the adapter leaves out still belongs to this module
            covered = {id(p) for p in own.values()}
            for own_name, p in _own_parameters(module).items():
                if id(p) not in covered:
                    theirs = _uses(name, module, own_name, None, "left out by its adapter", inside)
                    uses.setdefault(id(p), []).extend(theirs)
    return uses


#: id(module) → the hosts that run it: name, host, name of the module inside it
Inside = dict[int, list[tuple[str, Host, str]]]


def _inside_hosts(model: nn.Module) -> Inside:
    inside: Inside = {}
    hosts = [(name, m) for name, m in model.named_modules() if isinstance(m, Host)]
    for name, host in hosts:
        if id(host) in inside:  # run by another host already
            continue
        for path, module in host.named_modules():
            if path:
                inside.setdefault(id(module), []).append((name, host, path))
    return inside


def _uses(
    name: str, module: nn.Module, own_name: str, adapter: Adapter | None, reason: str | None, inside: Inside
) -> list[Use]:
    """One use, or one for each host that runs the module."""
    if id(module) not in inside:
        return [Use(name, module, own_name, adapter, reason)]
    return [Use(n, module, own_name, adapter, reason, host, path) for n, host, path in inside[id(module)]]


def _own_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {n: p for n, p in module._parameters.items() if p is not None}


def resolve(curvature: str | Curvature) -> Curvature:
    return BY_NAME[curvature] if isinstance(curvature, str) else curvature


def gather(param_groups: Iterable[dict[str, Any]], model: nn.Module | None) -> list[Player]:
    """The players of all parameter groups, in the order of the groups."""
    uses = find_uses(model)
    group_of = {id(p): g for g in param_groups for p in g["params"]}
    name_of = {id(p): n for n, p in model.named_parameters()} if model is not None else {}
    players: list[Player] = []
    joined: set[int] = set()
    for group in param_groups:
        names = group.get("param_names") or [
            name_of.get(id(p), f"parameter {i}") for i, p in enumerate(group["params"])
        ]
        for name, p in zip(names, group["params"], strict=True):
            if id(p) in joined:
                continue
            player = _player(name, p, group, uses, group_of)
            joined.update(id(q) for q in player.params)
            players.append(player)
    return players


def _player(
    name: str,
    p: Tensor,
    group: dict[str, Any],
    uses: dict[int, list[Use]],
    group_of: dict[int, dict[str, Any]],
) -> Player:
    """The player of one parameter, with the other parameters of its layer where one metric joins them."""
    mine = uses.get(id(p), [])
    curvature = resolve(group["curvature"])
    if not curvature.needs_model:
        return Player(name, [p], [group], curvature, [mine])
    block, why = _kronecker_block(mine, group, uses, group_of)
    if block:
        name = name.removesuffix(mine[0].own_name).removesuffix(".") or type(mine[0].module).__name__
        return Player(name, block, [group_of[id(q)] for q in block], curvature, [uses[id(q)] for q in block])
    return Player(name, [p], [group], BY_NAME["adaptive"], [mine], [f"{why}: adaptive curvature"])


def _kronecker_block(
    mine: Sequence[Use],
    group: dict[str, Any],
    uses: dict[int, list[Use]],
    group_of: dict[int, dict[str, Any]],
) -> tuple[list[Tensor], str]:
    """The parameters that share a Kronecker block, or why there is no such block."""
    if len(mine) != 1:
        return [], "shared by several modules" if mine else "not a parameter of the attached model"
    use = mine[0]
    if use.adapter is None:
        return [], use.reason or "no adapter"
    wanted = use.adapter.kronecker_names(use.module)
    if use.own_name not in wanted:
        return [], "no Kronecker structure"
    own = use.adapter.parameters(use.module)
    block: list[Tensor] = []
    for name in wanted:
        q = own[name]
        theirs = group_of.get(id(q))
        if theirs is None or not q.requires_grad:
            return [], f"{name} of the same layer is not trained with it"
        if len(uses[id(q)]) != 1:
            return [], f"{name} of the same layer is shared by several modules"
        if any(theirs[k] is not v and theirs[k] != v for k, v in group.items() if k not in _MAY_DIFFER):
            return [], f"{name} of the same layer has other hyper-parameters"
        block.append(q)
    return block, ""

"""Dense metrics C_k, computed from their definitions: a block of one matrix for each layer of a stage, statistics kept
between steps.

Nothing here touches the engine: adjoints come from autograd, patches from ``unfold``, Kronecker products are formed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.nn.functional import unfold

Options = Mapping[str, Any]


@dataclass
class Slot:
    """One parameter in the vector θ_k of its stage."""

    name: str
    parameter: nn.Parameter
    place: slice
    options: Options


def slots(piece: nn.Module, options: Mapping[nn.Parameter, Options]) -> list[Slot]:
    found, start = [], 0
    for name, p in piece.named_parameters():
        found.append(Slot(name, p, slice(start, start + p.numel()), options[p]))
        start += p.numel()
    return found


def modules(piece: nn.Module) -> list[nn.Module]:
    """What a piece runs, one after the other."""
    return list(piece) if isinstance(piece, nn.Sequential) else [piece]


@dataclass
class Statistics:
    """The metric of one parametrised layer of a stage."""

    layer: nn.Module
    before: Sequence[nn.Module]  # what the stage runs before the layer, and after it
    after: Sequence[nn.Module]
    all_slots: Sequence[Slot]  # of the stage
    turn: int = 1
    steps: int = 0
    second_moment: dict[str, Tensor] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        mine = set(self.layer.parameters())
        self.slots = [slot for slot in self.all_slots if slot.parameter in mine]

    @property
    def has_factors(self) -> bool:
        return _has_factors(self.layer, self.slots)

    def metric(self, X: Tensor, theta: Tensor, adjoint: Tensor) -> Tensor:
        """Learn from the state X and the (weighted) adjoint of the stage's output; give C, P×P, zero for the others."""
        self.steps += 1
        values = {s.parameter: theta[s.place].view_as(s.parameter) for s in self.all_slots}

        def run(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
            for module in modules:
                x = functional_call(module, {n: values[p] for n, p in module.named_parameters()}, (x,))
            return x

        x = run(self.before, X)
        own = {n: values[p] for n, p in self.layer.named_parameters()}
        y, to_parameters = vjp(lambda own: functional_call(self.layer, own, (x,)), own)
        h = vjp(lambda y: run(self.after, y), y)[1](adjoint)[0]
        gradient = to_parameters(h)[0]
        C = torch.zeros(len(theta), len(theta), dtype=torch.float64)
        if self.has_factors:
            self._kronecker(C, x, h)
            return C
        for s, g in zip(self.slots, gradient.values(), strict=True):
            C[s.place, s.place] = torch.diag(self._diagonal(s, g.flatten(), theta[s.place]))
        return C

    def _diagonal(self, slot: Slot, g: Tensor, theta: Tensor) -> Tensor:
        o = slot.options
        if o["curvature"] == "identity":
            return torch.ones_like(g)
        q = g if o["decoupled_weight_decay"] else g + o["weight_decay"] * theta
        before = self.second_moment.get(slot.name, torch.zeros_like(g))
        self.second_moment[slot.name] = v = o["decay"] * before + (1 - o["decay"]) * q**2
        if o["bias_correction"]:
            v = v / (1 - o["decay"] ** self.steps)
        return v.sqrt() + o["eps"]

    def _kronecker(self, C: Tensor, x: Tensor, h: Tensor) -> None:
        factors = list(_factors(self.layer, x, h))
        if self.steps == 1:
            self.blocks = [Block(self.slots[0].options, self.turn) for _ in factors]
        for block, (x_block, h_block, index) in zip(self.blocks, factors, strict=True):
            index = self.slots[0].place.start + index
            C[index[:, None], index] = block.matrix(x_block, h_block, self.steps)


def statistics(piece: nn.Module, slots: Sequence[Slot]) -> list[Statistics]:
    """Of each parametrised layer of a stage."""
    parts = modules(piece)
    found = [Statistics(part, parts[:i], parts[i + 1 :], slots) for i, part in enumerate(parts)]
    return [each for each in found if each.slots]


@dataclass
class Block:
    """U (Σ_A ⊗ Σ_C + λ) U^T of one block of a layer, on [c, a] matrices flattened row by row."""

    options: Options
    turn: int  # steps from the first basis to the second
    A: Tensor = field(init=False)
    C: Tensor = field(init=False)
    basis: tuple[Tensor, Tensor] = field(init=False)
    eigenvalues: Tensor = field(init=False)
    C_k: Tensor = field(init=False)  # without damping

    def matrix(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        """``x``: [samples, positions, a]; ``h``: [samples, positions, c], B times autograd's adjoint."""
        o = self.options
        A = torch.einsum("bti,btj->ij", x, x) / len(x)
        C = torch.einsum("bti,btj->ij", h, h) / (len(h) * h.shape[1])
        rho, age = o["factor_decay"], t - 2 - self.turn
        if age >= 0 and age % o["refresh_every"] == 0:  # of what the steps before have left
            self.decompose(goes_on=o["ekfac"])
        self.A, self.C = (A, C) if t == 1 else (rho * self.A + (1 - rho) * A, rho * self.C + (1 - rho) * C)
        if t == 1:
            self.decompose(goes_on=False)
        U_A, U_C = self.basis
        if o["ekfac"]:
            rotated = torch.stack([U_C.T @ h_i.T @ x_i @ U_A for x_i, h_i in zip(x, h, strict=True)])
            moments = rotated.square().mean(0)
            self.eigenvalues = moments if t == 1 else rho * self.eigenvalues + (1 - rho) * moments
        U = torch.kron(U_C.contiguous(), U_A.contiguous())
        self.C_k = U @ torch.diag(self.eigenvalues.flatten()) @ U.T
        return self.C_k + o["damping"] * torch.eye(len(U), dtype=U.dtype)

    def decompose(self, goes_on: bool) -> None:
        (a, U_A), (c, U_C) = torch.linalg.eigh(self.A), torch.linalg.eigh(self.C)
        U = torch.kron(U_C.contiguous(), U_A.contiguous())
        self.eigenvalues = (U.T @ self.C_k @ U).diagonal().view(len(c), -1) if goes_on else torch.outer(c, a)
        self.basis = U_A, U_C


def take_turns(layers: Sequence[Statistics]) -> None:
    """Decide how many steps after the first each layer has its next refresh: at as many times as there are layers or
    steps, equally far apart, the largest layers first and where there is least to do.
    """
    layers = [layer for layer in layers if layer.has_factors]
    if not layers:
        return

    def work(layer: Statistics) -> int:
        shape = layer.slots[0].parameter.shape
        return int(shape[0] ** 3 + shape[1:].numel() ** 3)

    every = layers[0].slots[0].options["refresh_every"]
    load = [0] * min(len(layers), every)
    for layer in sorted(layers, key=work, reverse=True):
        place = load.index(min(load))
        load[place] += work(layer)
        layer.turn = (place + 1) * every // len(load)


def _has_factors(layer: nn.Module, slots: Sequence[Slot]) -> bool:
    """Linear and convolutional layers whose weight and bias agree on everything but weight decay."""
    ignored = ("params", "weight_decay")
    options = [{k: v for k, v in slot.options.items() if k not in ignored} for slot in slots]
    agree = all(o == options[0] for o in options)
    return isinstance(layer, nn.Linear | nn.Conv2d) and options[0]["curvature"] == "kronecker" and agree


def _factors(layer: nn.Module, X: Tensor, h: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """x, h̃ of each block of a layer, and where the entries of its matrix lie in the parameter vector."""
    blocks = 1
    if isinstance(layer, nn.Conv2d):
        blocks = layer.groups
        geometry = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        channels = X.shape[1] // blocks
        inputs = [unfold(part, *geometry).mT for part in X.split(channels, 1)]
        adjoints = [part.flatten(2).mT for part in h.split(h.shape[1] // blocks, 1)]
    else:
        inputs, adjoints = [X.reshape(len(X), -1, X.shape[-1])], [h.reshape(len(h), -1, h.shape[-1])]
    weight = layer.weight
    assert isinstance(weight, Tensor)
    place = torch.arange(weight.numel()).view(blocks, -1, inputs[0].shape[-1])
    if layer.bias is not None:
        inputs = [torch.cat([x, torch.ones_like(x[..., :1])], -1) for x in inputs]
        bias = weight.numel() + torch.arange(len(weight)).view(blocks, -1, 1)
        place = torch.cat([place, bias], -1)
    for x, h_block, index in zip(inputs, adjoints, place, strict=True):
        yield x, len(X) * h_block, index.flatten()

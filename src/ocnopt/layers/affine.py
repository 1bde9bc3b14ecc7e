"""Layers of the form *weight times input plus bias*, at one or many positions: linear and convolutional."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ocnopt.groups import Groups
from ocnopt.layers import outer
from ocnopt.layers.base import Adapter, Call, KroneckerInputs, spread


class Affine(Adapter):
    """What such layers share once they are seen as blocks of matrices, ``[blocks, c, a]``."""

    covers = ("weight", "bias")
    bias_in_block = True  # whether the bias is an extra input 1 of every block's matrix
    channels = -1  # the dimension of the output that the bias belongs to

    @abstractmethod
    def factors(self, call: Call) -> KroneckerInputs:
        """``x`` and ``h`` whose outer products make the gradient of the weight, without the extra input 1."""

    @abstractmethod
    def sizes(self, call: Call) -> tuple[int, int, int]:
        """shared, a, c of :meth:`factors`, without forming it."""

    @abstractmethod
    def apply(self, call: Call, weight: Tensor) -> Tensor:
        """The output of the layer, without bias, if its weight were ``weight``."""

    @abstractmethod
    def blocks(self, module: nn.Module, weight: Tensor) -> Tensor:
        """A tensor shaped as the weight, after any leading dimensions, as ``[..., blocks, c, a]``."""

    @abstractmethod
    def unblock(self, module: nn.Module, matrix: Tensor) -> Tensor:
        """The inverse of :meth:`blocks`."""

    def seen_factors(self, call: Call) -> KroneckerInputs:
        """As :meth:`factors`, without inputs that are zero because of where they are."""
        return self.factors(call)

    def weight_part(self, call: Call) -> tuple[slice, ...]:
        """See :meth:`parts`; ``()``: all of it."""
        return ()

    def unblock_part(self, call: Call, matrix: Tensor) -> Tensor:
        """As :meth:`unblock`, of matrices of :meth:`seen_factors`."""
        return self.unblock(call.module, matrix)

    def weight_part_gradients(self, call: Call, groups: Groups) -> Tensor:
        """``[r, …]``, of that part of the weight."""
        factors = self.seen_factors(call)
        return self.unblock_part(call, outer.group_sums(factors.x, factors.h, groups))

    def weight_gradients(self, call: Call, groups: Groups) -> Tensor:
        """``[r, *weight.shape]``."""
        found = self.weight_part_gradients(call, groups)
        return spread(found, self.weight_part(call), self.parameters(call.module)["weight"].shape)

    def parts(self, call: Call) -> dict[str, tuple[slice, ...]]:
        part = self.weight_part(call)
        return {"weight": part} if part else {}

    def group_gradients(self, call: Call, groups: Groups) -> dict[str, Tensor]:
        return self._gradients(call, groups, self.weight_gradients)

    def part_gradients(self, call: Call, groups: Groups) -> dict[str, Tensor]:
        if not self.weight_part(call):
            return self.group_gradients(call, groups)
        return self._gradients(call, groups, self.weight_part_gradients)

    def _gradients(self, call: Call, groups: Groups, of_weight: Callable[[Call, Groups], Tensor]) -> dict[str, Tensor]:
        names = self.parameters(call.module)
        gradients = {}
        if "weight" in names:
            gradients["weight"] = of_weight(call, groups)
        if "bias" in names:
            _, h = outer.operands(call)
            gradients["bias"] = groups.sum(h, self._shared(h))
        return gradients

    def grams(self, call: Call) -> dict[str, Tensor]:
        names = self.parameters(call.module)
        grams = {}
        if "weight" in names:
            grams["weight"] = self.weight_gram(call)
        if "bias" in names:
            rows = self._bias_rows(call)
            grams["bias"] = rows @ rows.T
        return grams

    def weight_gram(self, call: Call) -> Tensor:
        factors = self.seen_factors(call)
        return outer.gram(factors.x, factors.h)

    def project(self, call: Call, direction: Mapping[str, Tensor]) -> Tensor:
        # The output is linear in the parameters: ⟨g_i, v⟩ = ⟨h_i, output with v for the parameters⟩.
        _, h = outer.operands(call)
        terms = []
        for name, v in direction.items():
            if name == "weight":
                terms.append(torch.linalg.vecdot(h.flatten(1), self.apply(call, v.to(h.dtype)).flatten(1)))
            elif name == "bias":
                terms.append(self._bias_rows(call) @ v.to(h.dtype))
            else:
                raise KeyError(f"direction has {name!r}, which is not a parameter of {call.module}")
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)

    def prefers_gram(self, call: Call, rank: int) -> bool:
        return outer.gram_is_cheaper(call.batch, *self.sizes(call), rank, outer.traffic(call.h))

    def kronecker_names(self, module: nn.Module) -> tuple[str, ...]:
        names = self.parameters(module)
        if "weight" not in names:
            return ()
        return ("weight", "bias") if "bias" in names and self.bias_in_block else ("weight",)

    def kronecker_inputs(self, call: Call) -> KroneckerInputs:
        factors = self.factors(call)
        if "bias" in self.kronecker_names(call.module):
            factors.x = torch.cat([factors.x, factors.x.new_ones(*factors.x.shape[:-1], 1)], dim=-1)
        return factors

    def kronecker_positions(self, call: Call) -> int:
        return self.sizes(call)[0]

    def to_matrix(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        matrix = self.blocks(module, tensors["weight"])
        if "bias" not in self.kronecker_names(module):
            return matrix
        return torch.cat([matrix, tensors["bias"].reshape(*matrix.shape[:-1], 1)], dim=-1)

    def from_matrix(self, module: nn.Module, matrix: Tensor) -> dict[str, Tensor]:
        if "bias" not in self.kronecker_names(module):
            return {"weight": self.unblock(module, matrix)}
        return {"weight": self.unblock(module, matrix[..., :-1]), "bias": matrix[..., -1].flatten(-2)}

    def _bias_rows(self, call: Call) -> Tensor:
        """The samples' gradients of the bias, ``[B, out]``."""
        _, h = outer.operands(call)
        shared = self._shared(h)
        return h.sum(shared) if shared else h

    def _shared(self, h: Tensor) -> list[int]:
        """The dimensions of the output that are neither samples nor channels."""
        return [dim for dim in range(1, h.dim()) if dim != self.channels % h.dim()]

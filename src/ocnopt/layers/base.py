"""What the engine asks of a layer kind.

One vocabulary for all of them: ``[batch, shared, features]``. *Batch* are the samples (dimension 0), *shared*
the positions at which a sample uses the same weights (pixels of a convolution, tokens of a sequence),
*features* the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ocnopt.groups import Groups
from ocnopt.rng import RNGState
from ocnopt.stock import Stock
from ocnopt.trees import mapped, tensors


@dataclass
class Call:
    """One execution of one parametrised module, with what the backward pass said about it.

    ``h`` is ∂L/∂(output) of this execution, in autograd's scale: summed, not averaged, over what the loss
    averages. Where the output is a tuple, it is that of its first tensor.

    Three fields say what the execution depended on besides its arguments, so that it can be repeated later:
    the random numbers (kept only where :meth:`Adapter.needs_rng` says so), the module's mode, and the dtype
    of autocast (``None`` if off).
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    h: Tensor
    rng: RNGState | None = field(default=None, repr=False)
    training: bool | None = None  # None: the mode in which the module is when the Call is made
    autocast: torch.dtype | None = None
    # of a module in continuous time: the length of time that this execution stands for, and which part that is of the
    # whole solve. The gradient of the layer is Σ duration · (gradient of the call).
    duration: float = 1.0
    share: float = 1.0
    # what was computed from the arguments, where they are going to be asked for it again
    memo: dict[str, Tensor] | None = field(default=None, repr=False)
    # where memory is kept for what is computed anew in every step
    stock: Stock | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.training is None:
            self.training = self.module.training

    @property
    def x(self) -> Tensor:
        """The first tensor among the arguments."""
        if self.args and isinstance(self.args[0], Tensor):  # as nearly always
            return self.args[0]
        x = first_tensor((self.args, self.kwargs))
        assert x is not None
        return x

    @property
    def batch(self) -> int:
        return self.h.shape[0]

    def rows(self, start: int, end: int) -> Call:
        """The same call with some of the samples, where they are dimension 0 of arguments and adjoint."""
        if start == 0 and end >= self.batch:
            return self
        of_samples = lambda t: t[start:end] if t.shape[:1] == (self.batch,) else t  # noqa: E731
        args, kwargs = mapped(of_samples, (self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs, h=self.h[start:end], memo=None)

    def weighted(self, rows: Tensor) -> Call:
        """The same call with the adjoint of every sample multiplied by its entry of ``rows``, ``[B]``."""
        h = self.h.to(compute_dtype(self.h.dtype))  # a weight rounded to bfloat16 would be off by up to 0.4 %
        return replace(self, h=h * rows.to(h.dtype).view(-1, *[1] * (h.dim() - 1)))


@dataclass
class KroneckerInputs:
    """Inputs and output adjoints whose sums of outer products are the gradient of the weight matrix.

    ``x``: ``[batch, blocks, shared, a]``, ``h``: ``[batch, blocks, shared, c]``; the gradient of block b is
    Σ h x^T over batch and shared, ``[blocks, c, a]``. ``blocks`` is 1 but for grouped convolutions. With
    ``names`` = (weight, bias) the bias is the last column: an extra input 1.
    """

    x: Tensor
    h: Tensor


class Adapter(ABC):
    """How one kind of layer turns ``(x, h)`` into gradients of groups of samples.

    Only :meth:`group_gradients` must be written; the rest has defaults that follow from it. Everything is
    asked for under ``no_grad``.
    """

    # The own parameters that the adapter knows; None: all of them. A module may have others, for example
    # those from which a reparametrisation computes its weight.
    covers: tuple[str, ...] | None = None

    # Does the layer act in the stage of the layer before it? The two are one map with joint parameters, and what lies
    # between them is no state of its own. For layers that cost less to run than a state costs to keep and to compare.
    joins: bool = False

    @abstractmethod
    def group_gradients(self, call: Call, groups: Groups) -> dict[str, Tensor]:
        """``{parameter name: [r, *parameter.shape]}``: Σ of the samples' gradients over each group.

        Names are those of :meth:`parameters`; what is left out is trained from ``p.grad``.
        """

    def parts(self, call: Call) -> dict[str, tuple[slice, ...]]:
        """Outside of which a parameter has no gradient, whatever the numbers are; those that have it everywhere are
        left out. Of a kernel on an image of one pixel, say, only the tap in the middle sees anything.
        """
        return {}

    def part_gradients(self, call: Call, groups: Groups) -> dict[str, Tensor]:
        """As :meth:`group_gradients`, of these parts alone."""
        return self.group_gradients(call, groups)

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters whose gradients a call of ``module`` accounts for, by their names in the module."""
        own = {n: p for n, p in module._parameters.items() if p is not None and p.requires_grad}
        return own if self.covers is None else {n: p for n, p in own.items() if n in self.covers}

    def grams(self, call: Call) -> dict[str, Tensor]:
        """``{parameter name: [B, B]}``: inner products ⟨g_i, g_j⟩ of samples' gradients, by parameter."""
        per_sample = self.group_gradients(call, Groups(call.batch, call.batch))
        flat = {name: _as_rows(g) for name, g in per_sample.items()}
        return {name: g @ g.T for name, g in flat.items()}

    def gram(self, call: Call) -> Tensor:
        """``[B, B]``: inner products ⟨g_i, g_j⟩, all parameters of the layer together."""
        return torch.stack(list(self.grams(call).values())).sum(0)

    def project(self, call: Call, direction: Mapping[str, Tensor]) -> Tensor:
        """``[B]``: inner product ⟨g_i, v⟩ of each sample's gradient with a direction in parameter space."""
        per_sample = self.group_gradients(call, Groups(call.batch, call.batch))
        terms = [_as_rows(per_sample[n]) @ v.to(per_sample[n].dtype).flatten() for n, v in direction.items()]
        return torch.stack(terms).sum(0)

    def prefers_gram(self, call: Call, rank: int) -> bool:
        """Whether :meth:`gram` is cheaper than r explicit gradients."""
        return False

    def product(self, module: nn.Module) -> Callable[..., Tensor] | None:
        """The function of torch that the layer is: its output is that of ``function(x, weight, bias, …)``. Then
        autograd's gradients of weight and bias may be taken from :meth:`group_gradients`, whose sum must be exact. Of
        ``F.batch_norm`` all gradients come from a kernel, where there is one.
        """
        return None

    def pull_back(self, call: Call, weight: Tensor) -> Tensor:
        """∂L/∂x, in operations that can be differentiated again. Only asked for where there is a :meth:`product`."""
        raise TypeError(f"{type(self).__name__} has no product")

    def kronecker_names(self, module: nn.Module) -> tuple[str, ...]:
        """What one Kronecker block holds: ``("weight", "bias")``, ``("weight",)`` or, if none, ``()``."""
        return ()

    def kronecker_inputs(self, call: Call) -> KroneckerInputs:
        """Only asked for when :meth:`kronecker_names` is not empty."""
        raise TypeError(f"{type(self).__name__} has no Kronecker structure")

    def kronecker_positions(self, call: Call) -> int:
        """How many positions of a sample share the weight: ``shared`` of :meth:`kronecker_inputs`."""
        return self.kronecker_inputs(call.rows(0, 1)).h.shape[2]

    def kronecker_sums(self, call: Call) -> tuple[Tensor, Tensor]:
        """Σ x x^T and Σ h h^T over batch and shared, ``[blocks, a, a]`` and ``[blocks, c, c]``."""
        inputs = self.kronecker_inputs(call)
        return outer_sum(inputs.x), outer_sum(inputs.h)

    def sums_inputs(self, call: Call) -> bool:
        """Does :meth:`kronecker_sums` form :meth:`kronecker_inputs`? They can then serve for more than that."""
        return True

    def kronecker_gradients(self, call: Call) -> Tensor:
        """The gradient of each sample as a matrix, Σ h x^T over shared: ``[batch, blocks, c, a]``."""
        inputs = self.kronecker_inputs(call)
        return inputs.h.mT @ inputs.x

    def to_matrix(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensors shaped as the Kronecker parameters, leading dimensions first: ``[..., blocks, c, a]``."""
        raise TypeError(f"{type(self).__name__} has no Kronecker structure")

    def from_matrix(self, module: nn.Module, matrix: Tensor) -> dict[str, Tensor]:
        """The inverse of :meth:`to_matrix`."""
        raise TypeError(f"{type(self).__name__} has no Kronecker structure")

    def needs_rng(self, module: nn.Module) -> bool:
        """Whether a call can only be repeated with the random numbers it drew: then keep ``Call.rng``."""
        return False

    def couples_samples(self, module: nn.Module) -> bool:
        """Whether samples see each other in a call, so that a group's gradient means "by row of ``h``"."""
        return False

    def refusal(self, module: nn.Module) -> str | None:
        """Why this very module cannot be treated and is trained from ``p.grad``, or ``None``."""
        return None

    def call_refusal(self, call: Call) -> str | None:
        """Why this one execution cannot be treated although its module can, or ``None``."""
        if first_tensor((call.args, call.kwargs)) is None:
            return "no tensor among its arguments could hold the samples"
        if call.h.dim() == 0 or call.x.dim() == 0 or call.x.shape[0] != call.h.shape[0]:
            return "dimension 0 of its output is not that of its input, so it cannot be the samples"
        return None


def spread(v: Tensor, part: tuple[slice, ...], shape: Sequence[int]) -> Tensor:
    """A tensor of a part of a parameter, with zeros around it; or several, ``[r, …]``."""
    if not part:
        return v
    lead = v.shape[: v.dim() - len(shape)]
    found = v.new_zeros(*lead, *shape)
    found[(slice(None),) * len(lead) + part] = v
    return found


def first_tensor(tree: Any) -> Tensor | None:
    return next(iter(tensors(tree)), None)


def outer_sum(v: Tensor) -> Tensor:
    """Σ v v^T over batch and shared of ``[batch, blocks, shared, n]``: ``[blocks, n, n]``."""
    if v.shape[2] > v.shape[3]:  # less to write than to copy
        return (v.mT @ v).sum(0)
    flat = v.transpose(0, 1).flatten(1, 2)
    return flat.mT @ flat


def _as_rows(g: Tensor) -> Tensor:
    """``[B, *shape] -> [B, P]``, also for a parameter that is a single number."""
    return g.unsqueeze(-1).flatten(1)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Gradients and kernels are never formed in less than float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

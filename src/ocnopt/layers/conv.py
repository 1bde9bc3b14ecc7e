"""Convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ocnopt.fused.native import taps
from ocnopt.groups import Groups
from ocnopt.layers import outer, shifts, windows
from ocnopt.layers.affine import Affine
from ocnopt.layers.base import Call, KroneckerInputs, outer_sum
from ocnopt.layers.registry import register
from ocnopt.layers.shifts import Axis
from ocnopt.layers.ways import Way, suits_taps, way
from ocnopt.layers.windows import Sight

#: where a call keeps its windows, those of some taps or of all
_WINDOWS = "windows {}"

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class Conv(Affine):
    """``y = W * x + b``: blocks are the layer's channel groups, the shared positions those of the output."""

    channels = 1

    def factors(self, call: Call) -> KroneckerInputs:
        return self._factors(call, None)

    def seen_factors(self, call: Call) -> KroneckerInputs:
        return self._factors(call, self._sight(call))

    def _factors(self, call: Call, seen: Sight | None) -> KroneckerInputs:
        module, (x, h), memo = _conv(call), outer.operands(call), {} if call.memo is None else call.memo
        name = _WINDOWS.format(seen)
        if name not in memo:
            x, padding = _padded(module, x)
            memo[name] = windows.windows(x, _axes(module, x, padding, h.shape[2:]), module.groups, seen)
        return KroneckerInputs(memo[name], _positions(h, module.groups))

    def _geometry_of(self, call: Call) -> tuple[Axis, ...] | None:
        """Of what the kernel sees, where all that is padded are zeros, the same on both sides."""
        module = _conv(call)
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            return None
        return _axes(module, call.x, _symmetric(module), call.h.shape[2:])

    def _sight(self, call: Call) -> Sight | None:
        """``None`` where all taps see something, or are taken to: on a GPU it takes longer to lay out what the others
        have than to multiply zeros.
        """
        axes = self._geometry_of(call) if call.h.device.type == "cpu" else None
        seen = None if axes is None else windows.sight(axes)
        return None if axes is None or seen == windows.everything(axes) else seen

    def weight_part(self, call: Call) -> tuple[slice, ...]:
        seen = self._sight(call)
        return () if seen is None else (slice(None), slice(None), *seen.taps)

    def sizes(self, call: Call) -> tuple[int, int, int]:
        module, seen = _conv(call), self._sight(call)
        kernel = math.prod(module.kernel_size if seen is None else seen.kernel)
        a, c = module.in_channels // module.groups * kernel, module.out_channels // module.groups
        return math.prod(call.h.shape[2:]), a, c

    def kronecker_sums(self, call: Call) -> tuple[Tensor, Tensor]:
        module, (x, h) = _conv(call), outer.operands(call)
        x, padding = _padded(module, x)
        A = _outer_of_windows(module, x, padding, h.shape[2:])
        if "bias" in self.kronecker_names(module):
            axes = _axes(module, x, padding, h.shape[2:])
            A = _with_ones(A, windows.windows(x.sum(0, keepdim=True), axes, module.groups)[0].sum(1), h)
        return A, outer_sum(_positions(h, module.groups))

    def sums_inputs(self, call: Call) -> bool:
        module = _conv(call)
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            return False
        x, y = (call.h, call.x) if module.transposed else (call.x, call.h)
        axes, blocks = _axes(module, x, _symmetric(module), y.shape[2:]), module.groups
        return shifts.cheapest(axes, len(x), blocks, x.shape[1] // blocks, x.device.type) == 0

    def kronecker_gradients(self, call: Call) -> Tensor:
        if call.h.device.type != "cpu":  # there a group of channels for each sample is not what libraries are good at
            return super().kronecker_gradients(call)
        each = Groups(call.batch, call.batch)
        gradients = {"weight": self.weight_gradients(call, each)}
        if "bias" in self.kronecker_names(call.module):
            gradients["bias"] = self._bias_rows(call)
        return self.to_matrix(call.module, gradients)

    def weight_gradients(self, call: Call, groups: Groups) -> Tensor:
        chosen = self._way(call, groups)
        if chosen in (Way.WINDOWS, Way.TAPS):
            return super().weight_gradients(call, groups)
        return _weight_gradients(_conv(call), *self._geometry(call), groups, chosen is Way.FOLDED)

    def weight_part_gradients(self, call: Call, groups: Groups) -> Tensor:
        match self._way(call, groups):
            case Way.WINDOWS:
                return super().weight_part_gradients(call, groups)
            case Way.TAPS:
                return self._gradients_by_tap(call, groups)
            case _:
                return self.weight_gradients(call, groups)[:, *self.weight_part(call)]

    def _gradients_by_tap(self, call: Call, groups: Groups) -> Tensor:
        module, (x, h) = _conv(call), outer.operands(call)
        x, padding = _padded(module, x)
        axes = _axes(module, x, padding, h.shape[2:])
        return taps.gradients(x, h, axes, self._sight(call) or windows.everything(axes), groups, call.stock)

    def weight_gram(self, call: Call) -> Tensor:
        axes, (x, h) = self._geometry_of(call), outer.operands(call)
        if axes is None or self._cost_by_pixels(call) >= outer.pair_cost(call.batch, *self.sizes(call)):
            return super().weight_gram(call)
        return windows.gram(x, h, axes, _conv(call).groups)

    def prefers_gram(self, call: Call, rank: int) -> bool:
        sizes = call.batch, *self.sizes(call)
        pairs = min(outer.pair_cost(*sizes), self._cost_by_pixels(call))
        return outer.gram_is_cheaper(*sizes, rank, outer.traffic(call.h), pairs)

    def _cost_by_pixels(self, call: Call) -> float:
        """Of the products of pairs of samples, by those of their pixels."""
        axes, module = self._geometry_of(call), _conv(call)
        if axes is None:
            return math.inf
        channels = module.in_channels // module.groups, module.out_channels // module.groups
        return windows.gram_cost(call.batch, axes, *channels)

    def _way(self, call: Call, groups: Groups) -> Way:
        if call.memo is not None and _WINDOWS.format(self._sight(call)) in call.memo:
            return Way.WINDOWS
        layer, positions = _conv(call), self.sizes(call)[0]
        strided = any(step > 1 for step in layer.stride)
        plain = layer.groups == 1 and not layer.transposed
        if plain and suits_taps(groups, call.x.shape, call.h.shape) and taps.fit(*outer.operands(call)):
            return Way.TAPS
        return way(call.h.device.type, groups, positions, _shape(layer), layer.groups, strided)

    def _geometry(self, call: Call) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Input and adjoint as a convolution takes them that pads with zeros alone; padding, and that of the output."""
        x, h = outer.operands(call)
        x, padding = _padded(_conv(call), x)
        return x, h, padding, [0] * len(padding)

    def apply(self, call: Call, weight: Tensor) -> Tensor:
        module, (x, _), seen = _conv(call), outer.operands(call), self._sight(call)
        x, padding = _padded(module, x) if seen is None else (seen.of(x), [0] * len(seen.taps))
        convolve = _CONV[len(padding)]
        return convolve(x, weight[self.weight_part(call)], None, module.stride, padding, module.dilation, module.groups)

    def blocks(self, module: nn.Module, weight: Tensor) -> Tensor:
        assert isinstance(module, _ConvNd)
        dims = weight.dim() - len(module.kernel_size) - 2
        return torch.unflatten(weight.flatten(dims + 1), dims, (module.groups, -1))

    def unblock(self, module: nn.Module, matrix: Tensor) -> Tensor:
        assert isinstance(module, _ConvNd)
        kernel = module.in_channels // module.groups, *module.kernel_size
        return torch.unflatten(matrix.flatten(-3, -2), -1, kernel)

    def unblock_part(self, call: Call, matrix: Tensor) -> Tensor:
        seen = self._sight(call)
        if seen is None:
            return self.unblock(call.module, matrix)
        return torch.unflatten(matrix.flatten(-3, -2), -1, (-1, *seen.kernel))

    def product(self, module: nn.Module) -> Callable[..., Tensor] | None:
        assert isinstance(module, _ConvNd)
        # any other padding is an operation of its own
        plain = module.padding_mode == "zeros" and module.padding != "same"
        return _CONV[len(module.kernel_size)] if plain else None

    def pull_back(self, call: Call, weight: Tensor) -> Tensor:
        module = _conv(call)
        _, padding = _padded(module, call.x)
        geometry = (module.stride, padding, module.dilation, False, [0] * len(padding), module.groups)
        wanted = [True, False, False]

        def into(x: Tensor, h: Tensor) -> Tensor:
            found: Tensor = torch.ops.aten.convolution_backward(h, x, weight, None, *geometry, wanted)[0]
            return found

        return into(call.x, call.h) if torch.is_grad_enabled() else _in_parts(into, call.x, call.h)

    def refusal(self, module: nn.Module) -> str | None:
        base = next(t for t in type(module).__mro__ if t in _KINDS)
        if getattr(type(module), "_conv_forward", None) is not getattr(base, "_conv_forward", None):
            return f"{type(module).__name__} overrides the _conv_forward of {base.__name__}"
        return None

    def call_refusal(self, call: Call) -> str | None:
        if call.x.dim() != len(_conv(call).kernel_size) + 2:
            return f"its input has no dimension of samples: {type(call.module).__name__} was given one alone"
        return super().call_refusal(call)


class ConvTranspose(Conv):
    """The roles swap: the shared positions are those of the input, each of which sees a window of the output.

    A bias is added once per output position, and not once per window, so it is not part of the block.
    """

    bias_in_block = False

    def product(self, module: nn.Module) -> Callable[..., Tensor] | None:
        return None

    def factors(self, call: Call) -> KroneckerInputs:
        module, (x, h) = _conv(call), outer.operands(call)
        axes = _axes(module, h, _symmetric(module), x.shape[2:])
        return KroneckerInputs(_positions(x, module.groups), windows.windows(h, axes, module.groups))

    def _geometry_of(self, call: Call) -> tuple[Axis, ...] | None:
        return None  # what it sees of the output is not padded

    def seen_factors(self, call: Call) -> KroneckerInputs:
        return self.factors(call)

    def sizes(self, call: Call) -> tuple[int, int, int]:
        module = _conv(call)
        kernel = math.prod(module.kernel_size)
        a, c = module.in_channels // module.groups, module.out_channels // module.groups * kernel
        return math.prod(call.x.shape[2:]), a, c

    def kronecker_sums(self, call: Call) -> tuple[Tensor, Tensor]:
        module, (x, h) = _conv(call), outer.operands(call)
        C = _outer_of_windows(module, h, _symmetric(module), x.shape[2:])
        return outer_sum(_positions(x, module.groups)), C

    def _geometry(self, call: Call) -> tuple[Tensor, Tensor, list[int], list[int]]:
        return *outer.operands(call), _symmetric(_conv(call)), _output_padding(call)

    def apply(self, call: Call, weight: Tensor) -> Tensor:
        module, (x, _) = _conv(call), outer.operands(call)
        padding = _symmetric(module), _output_padding(call)
        convolve = _CONV_TRANSPOSE[len(module.kernel_size)]
        return convolve(x, weight, None, module.stride, *padding, module.groups, module.dilation)

    def blocks(self, module: nn.Module, weight: Tensor) -> Tensor:
        return super().blocks(module, weight).mT

    def unblock(self, module: nn.Module, matrix: Tensor) -> Tensor:
        assert isinstance(module, _ConvTransposeNd)
        kernel = module.out_channels // module.groups, *module.kernel_size
        return torch.unflatten(matrix.mT.flatten(-3, -2), -1, kernel)


_KINDS: dict[type[nn.Module], Conv] = {
    nn.Conv1d: Conv(),
    nn.Conv2d: Conv(),
    nn.Conv3d: Conv(),
    nn.ConvTranspose1d: ConvTranspose(),
    nn.ConvTranspose2d: ConvTranspose(),
    nn.ConvTranspose3d: ConvTranspose(),
}
for _kind, _adapter in _KINDS.items():
    register(_kind, _adapter)


def _conv(call: Call) -> _ConvNd:
    assert isinstance(call.module, _ConvNd)
    return call.module


def _symmetric(module: _ConvNd) -> list[int]:
    """Padding that is given as numbers."""
    assert not isinstance(module.padding, str)
    return list(module.padding)


def _padded(module: _ConvNd, x: Tensor) -> tuple[Tensor, list[int]]:
    """The input with all padding that convolutions cannot do themselves, and the zeros still to be padded."""
    none = [0] * len(module.kernel_size)
    if module.padding == "valid":
        return x, none
    if module.padding_mode == "zeros" and module.padding != "same":
        return x, _symmetric(module)
    if module.padding == "same":  # the odd one goes to the right
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        sides = [(n // 2, n - n // 2) for n in total]
    else:
        sides = [(n, n) for n in _symmetric(module)]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, [n for side in reversed(sides) for n in side], mode=mode), none


def _output_padding(call: Call) -> list[int]:
    """Read off the adjoint's shape, since a call with ``output_size`` decides it anew."""
    module = _conv(call)
    sizes = zip(call.x.shape[2:], call.h.shape[2:], module.kernel_size, module.stride, strict=True)
    least = [(n - 1) * s + d * (k - 1) + 1 for (n, _, k, s), d in zip(sizes, module.dilation, strict=True)]
    return [m + 2 * p - n for m, p, n in zip(call.h.shape[2:], _symmetric(module), least, strict=True)]


def _positions(x: Tensor, blocks: int) -> Tensor:
    """``[B, channels, *space] -> [B, blocks, shared, channels of a block]``."""
    shared = math.prod(x.shape[2:])
    return x.reshape(x.shape[0], blocks, x.shape[1] // blocks, shared).mT


def _outer_of_windows(module: _ConvNd, x: Tensor, padding: list[int], positions: torch.Size) -> Tensor:
    """Σ over batch and positions of w w^T, w a window: ``[blocks, channels of a block × kernel, the same]``."""
    return shifts.outer(x, _axes(module, x, padding, positions), module.groups)


def _axes(module: _ConvNd, x: Tensor, padding: Sequence[int], positions: torch.Size) -> tuple[Axis, ...]:
    return _axes_of(x.shape[2:], positions, module.kernel_size, module.stride, module.dilation, tuple(padding))


@lru_cache(maxsize=1024)
def _axes_of(*geometry: tuple[int, ...]) -> tuple[Axis, ...]:
    return tuple(Axis(*each) for each in zip(*geometry, strict=True))


def _with_ones(A: Tensor, sums: Tensor, h: Tensor) -> Tensor:
    """Σ x x^T if each x had one more entry, 1. ``sums``: Σ x, ``[blocks, a]``; ``h`` has the positions."""
    count = A.new_full((len(A), 1, 1), h.shape[0] * math.prod(h.shape[2:]))
    return torch.cat([torch.cat([A, sums[:, None]], 1), torch.cat([sums[:, None], count], 2).mT], 2)


def _shape(module: _ConvNd) -> list[int]:
    """Of its weight."""
    channels = [module.out_channels, module.in_channels]
    first, second = reversed(channels) if module.transposed else channels
    return [first, second // module.groups, *module.kernel_size]


def _weight_gradients(
    module: _ConvNd,
    x: Tensor,
    h: Tensor,
    padding: list[int],
    output_padding: list[int],
    groups: Groups,
    folded: bool,
) -> Tensor:
    """``[r, *weight.shape]``, as many times the layer's own weight gradient or all groups in one call."""
    shape = _shape(module)

    def gradient(x: Tensor, h: Tensor, copies: int) -> Tensor:
        # Only the shape of the weight matters to its gradient, so one number stands for it.
        weight = x.new_empty(1).expand(copies * shape[0], *shape[1:])
        geometry = (module.stride, padding, module.dilation, module.transposed, output_padding)
        wanted = [False, True, False]
        g: Tensor = torch.ops.aten.convolution_backward(h, x, weight, None, *geometry, copies * module.groups, wanted)[
            1
        ]
        return g.reshape(copies, *shape)

    if groups.rank == 1:
        return gradient(x, h, 1)
    if folded:
        return gradient(_folded(groups, x), _folded(groups, h), groups.rank)
    parts = zip(x.split(groups.sizes), h.split(groups.sizes), strict=True)
    return torch.cat([gradient(x_g, h_g, 1) for x_g, h_g in parts])


def _in_parts(into: Callable[[Tensor, Tensor], Tensor], x: Tensor, h: Tensor) -> Tensor:
    """``into(x, h)``, of the shape of x, some samples at a time where that pays.

    On a CPU oneDNN writes both tensors down again in an order of its own, and the result, too. What large tensors leave
    goes back to the system, and it takes as long to get it page by page as to convolve. Measured (3×3 and 1×1, 16 to
    256 channels, 8×8 to 56×56 pixels, one core and two): from 8 MiB on, parts of 4 MiB take 0.4 to 0.85 of the time,
    and 0.99 to 1.07 where no page is new; below, up to 1.2.
    """
    size = max(x.numel(), h.numel())
    plain = x.device.type == "cpu" and x.is_contiguous() and h.is_contiguous()
    if not plain or size <= 2 * outer.CACHED:
        return into(x, h)
    found, count = torch.empty_like(x), min(-(-size // outer.CACHED), len(x))
    for part, *given in zip(*(t.tensor_split(count) for t in (found, x, h)), strict=True):
        part.copy_(into(*given))
    return found


def _folded(groups: Groups, x: Tensor) -> Tensor:
    """The groups of samples side by side as channels: ``[B, C, *space] -> [max n, r·C, *space]``."""
    return groups.split(x).transpose(0, 1).flatten(1, 2)

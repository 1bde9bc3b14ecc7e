"""Operations of a pass that nobody differentiates, without what only a first pass is for: the same numbers, sooner.

On a CPU most of the time of a max pooling goes into the places of the maxima. Averages of batch norms are put back
after a second pass, whatever it makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily

Ints = int | Sequence[int]


def max_pool(
    axes: int,
    original: Callable[..., Any],
    input: Tensor,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """As torch's, over the last ``axes`` dimensions: along one after another."""
    stride = stride or kernel_size
    if return_indices or not _is_slow(axes, input):
        more = [return_indices] * return_indices
        return original(input, kernel_size, stride, padding, dilation, ceil_mode, *more)
    sizes = (_each(axes, given) for given in (kernel_size, stride, padding, dilation))
    for axis, (kernel, step, before, apart) in zip(range(-axes, 0), zip(*sizes, strict=True), strict=True):
        input = _along(axis, input, kernel, step, before, apart, ceil_mode)
    return input


def _is_slow(axes: int, x: Tensor) -> bool:
    """Only without gradients is nothing missed; and with the channels last torch is quick."""
    plain = type(x) is Tensor and x.device.type == "cpu" and x.is_floating_point()
    return plain and not torch.is_grad_enabled() and x.is_contiguous() and x.stride(-1 - axes) > 1


def _each(axes: int, given: Ints) -> list[int]:
    numbers = [given] if isinstance(given, int) else list(given)
    return numbers * axes if len(numbers) == 1 else numbers


def _along(axis: int, x: Tensor, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> Tensor:
    """The maxima of windows in one dimension, counted from the last one."""
    size, width = x.shape[axis], dilation * (kernel - 1) + 1
    room = size + 2 * padding - width
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    if (count - 1) * stride >= size + padding:  # no window begins behind the end
        count -= 1
    behind = max((count - 1) * stride + width - size - padding, 0)
    if padding or behind:
        x = F.pad(x, [0, 0] * (-axis - 1) + [padding, behind], value=-torch.inf)
    largest, *others = x.unfold(axis, width, stride)[..., ::dilation].unbind(-1)
    out = x.new_empty(largest.shape)
    for other in others or [largest]:
        largest = torch.maximum(largest, other, out=out)
    return out


#: what does the same
QUICKER: dict[Any, Callable[..., Any]] = {
    original: partial(max_pool, axes, original)
    for axes, names in ((2, (F.max_pool2d, torch.max_pool2d)), (3, (F.max_pool3d, torch.max_pool3d)))
    for original in names
}


class Again(TorchFunctionMode):
    """Active while a model runs again."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return QUICKER.get(func, func)(*args, **(kwargs or {}))


def again(functions: Iterable[Any]) -> AbstractContextManager[Any]:
    """A block in which these functions are going to be called, among others."""
    return Again() if any(function in QUICKER for function in functions) else nullcontext()


def aside() -> AbstractContextManager[Any]:
    """A block in such a block, of what is no part of the model: many calls, each of which would be looked at."""
    stack = _get_current_function_mode_stack()
    return _pop_mode_temporarily() if stack and isinstance(stack[-1], Again) else nullcontext()


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def normalised(module: Any, input: Tensor) -> Tensor:
    """What one of these does in training, without its averages."""
    return F.batch_norm(input, None, None, module.weight, module.bias, True, 0.0, module.eps)

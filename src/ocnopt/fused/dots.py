"""⟨x, y⟩ in one kernel, where torch takes two and a third one for what is taken off."""

from __future__ import annotations

import torch
from torch import Tensor

from ocnopt import whole_step
from ocnopt.fused import support

#: no more than the last one can add up at once
_PROGRAMS = 512


class _Scratch:
    """What the programs of a dot product leave for the last of them. Kernels of one stream take turns."""

    def __init__(self) -> None:
        self._of_stream: dict[tuple[torch.device, int], Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        if device.type != "cuda" or whole_step.capturing():
            return whole_step.once((_Scratch, device), lambda: self._new(device))
        key = device, torch.cuda.current_stream(device).cuda_stream
        if key not in self._of_stream:
            self._of_stream[key] = self._new(device)
        return self._of_stream[key]

    @staticmethod
    def _new(device: torch.device) -> Tensor:
        """Sums, and a count of those who have come that is zero between two products."""
        return torch.zeros(_PROGRAMS + 1, dtype=torch.float32, device=device)


_scratch = _Scratch()


def dot(x: Tensor, y: Tensor, less: Tensor | None = None) -> Tensor | None:
    """⟨x, y⟩ of two vectors, less a number, in float32; ``None`` where that cannot be had."""
    if x.dtype not in support.KINDS or y.dtype not in support.KINDS or support.why_not_on(x.device) is not None:
        return None
    x, y = x.contiguous(), y.contiguous()  # a column, or a number that was expanded
    kernels, numbers = support.kernels(), x.numel()
    scratch, result = _scratch.on(x.device), x.new_empty((), dtype=torch.float32)
    arrivals = scratch[_PROGRAMS:].view(torch.int32)
    programs = min(max(-(-numbers // kernels.CHUNK), 1), _PROGRAMS)
    arguments = x, y, scratch if less is None else less, scratch, arrivals, result, numbers
    try:
        kernels.dot[programs,](*arguments, LESS=less is not None, CHUNK=kernels.CHUNK, BLOCK=kernels.BLOCK)
    except Exception as error:
        support.breaks(error)
        return None
    return result

"""Has anybody written to a tensor? Its version does not tell of everybody: a scaler, ``p.grad.data`` and numpy write
uncounted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ocnopt import whole_step

#: numbers that have one product with fixed ones in common, and those whose bits have
_ROW, _PIECE = 4096, 2**18


class Mark(NamedTuple):
    """Of a tensor at one moment."""

    place: int
    version: int
    prints: tuple[Tensor, Tensor] | None  # None: where nobody waits for them

    @classmethod
    def of(cls, t: Tensor) -> Mark:
        here = whole_step.may_look(t) and t.is_contiguous() and t.dtype in (torch.float32, torch.float64)
        return cls(t.data_ptr(), t._version, _prints(t) if here else None)

    def holds(self, t: Tensor | None) -> bool:
        """Is this the tensor, and has nobody written to it?

        Where its numbers cannot be looked at, only if nobody comes between: in a whole step that is captured.
        """
        if t is None or (t.data_ptr(), t._version) != (self.place, self.version):
            return False
        if whole_step.undisturbed():
            return True
        if self.prints is None or not whole_step.may_look(t) or not t.is_contiguous():
            return False
        return all(map(torch.equal, _prints(t), self.prints))  # what is not a number equals nothing, not even itself


def _prints(t: Tensor) -> tuple[Tensor, Tensor]:
    """Two that miss different things: numbers that are small beside others do not show in the first, and two signs in
    the second make up for each other.
    """
    flat = t.detach().view(-1)
    whole = flat.numel() - flat.numel() % _ROW
    rows, rest = flat[:whole].view(-1, _ROW), flat[whole:]  # what is left over stands for itself
    products = rest.clone() if not whole else torch.cat([torch.mv(rows, _fixed(t.dtype)), rest])
    bits = [(some * _odd()[: len(some)]).sum(dtype=torch.int32) for some in flat.view(torch.int32).split(_PIECE)]
    return products, torch.stack(bits)


@whole_step.remembered
def _fixed(dtype: torch.dtype) -> Tensor:
    """Numbers between 1 and 2, no two of them the same: what changes places is noticed, too."""
    return torch.rand(_ROW, dtype=dtype, generator=torch.Generator().manual_seed(0)) + 1


@whole_step.remembered
def _odd() -> Tensor:
    """By odd numbers every change of a single number's bits comes through."""
    draw = torch.randint(2**31 - 1, (_PIECE,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    return draw | 1

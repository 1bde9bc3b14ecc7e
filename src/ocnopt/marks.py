"""Has anybody written to a tensor? Its version does not tell of everybody: a scaler, ``p.grad.data`` and numpy write
uncounted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ocnopt import whole_step

#: so many numbers have one product in common
_ROW = 4096


class Mark(NamedTuple):
    """Of a tensor at one moment."""

    place: int
    version: int
    products: Tensor | None  # of its numbers, some at a time, with fixed ones; None: where nobody waits for them

    @classmethod
    def of(cls, t: Tensor) -> Mark:
        here = whole_step.may_look(t) and t.is_contiguous()
        return cls(t.data_ptr(), t._version, _products(t) if here else None)

    def holds(self, t: Tensor | None) -> bool:
        """Is it certain that this is the tensor, and that nobody has written to it?

        Where its numbers cannot be looked at, only if nobody comes between: in a whole step that is captured.
        """
        if t is None or (t.data_ptr(), t._version) != (self.place, self.version):
            return False
        if whole_step.undisturbed():
            return True
        # what is not a number equals nothing, not even itself
        return self.products is not None and whole_step.may_look(t) and torch.equal(_products(t), self.products)


def _products(t: Tensor) -> Tensor:
    """What is left over of the last row stands for itself."""
    flat = t.detach().view(-1)
    whole = flat.numel() - flat.numel() % _ROW
    rows, rest = flat[:whole].view(-1, _ROW), flat[whole:]
    return rest.clone() if not whole else torch.cat([torch.mv(rows, _fixed(t.dtype)), rest])


@whole_step.remembered
def _fixed(dtype: torch.dtype) -> Tensor:
    """Numbers between 1 and 2, no two of them the same: what changes places is noticed, too."""
    return torch.rand(_ROW, dtype=dtype, generator=torch.Generator().manual_seed(0)) + 1

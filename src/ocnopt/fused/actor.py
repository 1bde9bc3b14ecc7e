"""Acting by fused kernels. What each quantity is, :mod:`ocnopt.bucket` and :mod:`ocnopt.curvature.adaptive` say."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ocnopt import whole_step
from ocnopt.actor import Actor, Answer, Products, have_moved
from ocnopt.curvature import Adaptive
from ocnopt.fused.tables import Layout, Table
from ocnopt.gradients import Columns
from ocnopt.shelves import Shelf


@dataclass
class FusedActor(Actor):
    """State goes on when all have acted; where γθ is a part of the linear cost, when each does, since it is θ before
    the step that counts.
    """

    grads: list[Tensor]
    columns: Columns | None  # of groups of samples; None: all are one
    fractions: Tensor  # ν = n/B
    layout: Layout
    sign: int  # −1 where the loss is maximised
    ok: Tensor = field(init=False)
    fine: Tensor = field(init=False)  # the same as a boolean
    table: Table = field(init=False)
    rows: Tensor = field(init=False)  # [parameters, r² + 2r + 1]: G^T C^{-1} G, G^T C^{-1} ℓ, G^T γθ, squares
    taken: Tensor = field(init=False)  # [parameters, r]: the weights that they have acted with

    @classmethod
    @abstractmethod
    def chunk(cls) -> int:
        """Numbers of a parameter that one program looks at."""

    @property
    def rank(self) -> int:
        return len(self.fractions)

    def _table(self, grads: Sequence[Tensor]) -> Table | None:
        momentum = self.zeros_like_parameters("momentum") if self.group["momentum"] else None
        moments = self.zeros_like_parameters("second_moment") if self._adaptive else None
        return self.layout.table(grads, self.shelf.parts(self.params), momentum, moments)

    @abstractmethod
    def look(self) -> bool:
        """Form the products of the recursion. ``False`` where that cannot be done for once."""

    @abstractmethod
    def _act(self, answer: Answer | None, first: int, count: int, *, move: bool, carry: bool) -> None:
        """The parameters of some chunks. ``answer``: ``None`` if they have acted before, and are to do it again in all
        that follows from it.
        """

    @property
    def squares(self) -> Tensor:
        """``[parameters]``: g^T g; of groups, with those of the columns."""
        return self.rows[:, -1]

    @property
    def settled_last(self) -> frozenset[str]:
        return frozenset({"step"} if self.has_decay else {"step", "momentum", "second_moment"})

    # --- the backward pass of dynamic programming ---

    def measure(self, a: Tensor | None) -> None:
        assert a is None, "statistics that are weighted are none of these kernels' business"

    def products(self) -> Products:
        rows = torch.where(self.fine, self.rows, 0)
        self.shelf.owners.sum_([rows])
        r, costly = self.rank, self.group["momentum"] or self.has_decay
        K, u, free = rows[:, : r * r].unflatten(1, (r, r)), rows[:, r * r :][:, :r], rows[:, r * r + r :][:, :r]
        return Products(K, u if costly else None, free if self.has_decoupled_decay else None)

    # --- acting ---

    def apply(self, answer: Answer) -> None:
        self.taken = self.rows.new_empty(len(self.rows), self.rank)
        self._act(answer, 0, self.layout.total, move=True, carry=True)
        have_moved(self.shelf.parts(self.params))

    def coast(self) -> None:
        self.taken = self.rows.new_zeros(len(self.rows), self.rank)

    @property
    def _carries(self) -> bool:
        """Does state go on while they act? A second pass that is captured cannot fail."""
        return self.has_decay or whole_step.underway()

    def steer(self, seats: Sequence[int], answer: Answer) -> None:
        selected = self.shelf.select(seats)
        if selected is not None:
            self._find(selected[0], selected[1])
        for first, count in self.shelf.chunks(seats):
            self._act(answer, first, count, move=True, carry=self._carries)

    def settle(self) -> None:
        if not self._carries and (self.group["momentum"] or self._adaptive):
            self._find(self.shelf, range(len(self.params)))
            self._act(None, 0, self.layout.total, move=False, carry=True)
        have_moved(self.shelf.parts(self.params))

    def _find(self, shelf: Shelf, index: Sequence[int]) -> None:
        """These parameters: in a second pass a model may have put them somewhere else."""
        if self.layout.still_there(index, shelf.parts(shelf.params)):
            return
        table = self._table(self.grads)
        if table is None:
            raise RuntimeError(f"{shelf.players[0].name!r} was laid out anew while the model ran a second time")
        self._place(table)

    def _place(self, table: Table) -> None:
        self.table = table

    @cached_property
    def _adaptive(self) -> bool:
        return isinstance(self.shelf.curvature, Adaptive)

    @property
    def _averaged(self) -> bool:
        """Is the momentum an average, and corrected as such?"""
        return bool(self.group["ema"] and self.group["bias_correction"])

"""Acting by the kernels for a CPU. Numbers are at hand there: what a policy asks for is passed on as such."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ocnopt.actor import Answer
from ocnopt.fused.actor import FusedActor
from ocnopt.fused.native.binding import Act, Shelf, is_plain, kernels
from ocnopt.fused.native.columns import Lines, in_order, lines_of
from ocnopt.fused.tables import Table

#: numbers of a parameter that one thread looks at before it takes the next ones
CHUNK = 2**14


@dataclass
class NativeActor(FusedActor):
    groups: Tensor | None = field(init=False)  # [parameters]: addresses of the columns
    lines: Lines = field(init=False)
    gammas: Tensor = field(init=False)  # [parameters]
    described: Shelf = field(init=False)  # all that, as the kernels are told: where it is, as long as it is here

    @classmethod
    def chunk(cls) -> int:
        return CHUNK

    def look(self) -> bool:
        layout, params = self.layout, self.shelf.parts(self.params)
        groups = [] if self.columns is None else self.columns.tensors
        table = self._table(self.grads) if all(map(is_plain, [*params, *self.grads, *groups])) else None
        if table is None:
            return False
        self.table, width = table, self.rank**2 + 2 * self.rank + 1
        self.rows = torch.empty(layout.width, width, dtype=torch.float32, device="cpu")
        partials = torch.empty(layout.total, width + 1, dtype=torch.float64, device="cpu")
        if self._look(params, partials) and self.columns is not None:
            self.columns = self.columns.whole(params)  # somebody has written where the calls leave zeros
            self._look(params, partials)
        return True

    def _look(self, params: Sequence[Tensor], partials: Tensor) -> bool:
        """Is there anything in the gradients that columns of parts do not tell of?"""
        self.groups = None
        if self.columns is not None:
            self.columns = in_order(self.columns, params)
            self.groups = torch.tensor([*map(Tensor.data_ptr, self.columns.tensors)], device="cpu")
        self.lines, layout = lines_of(params, self.columns), self.layout
        self._place(self.table)
        into = partials.data_ptr(), self.rows.data_ptr(), layout.width
        return bool(kernels().ocnopt_look(self.described, layout.total, self.momentum_cost, *into))

    def _act(self, answer: Answer | None, first: int, count: int, *, move: bool, carry: bool) -> None:
        if not self.fine:
            return
        rate, w = float(self.lr), self.taken if answer is None else answer.w.contiguous()
        act = Act(
            w=w.data_ptr(),
            taken=self.taken.data_ptr(),
            mu=self.group["momentum"],
            intake=self.intake,
            players=self.fictitious,
            stride=rate / float(self._momentum_correction),
            rate=rate,
            again=answer is None,
            ahead=self.looks_ahead,
            move=move,
            carry=carry,
        )
        kernels().ocnopt_act(self.described, act, first, count)

    def _place(self, table: Table) -> None:
        self.table, self.described = table, self._describe(table)

    def _describe(self, table: Table) -> Shelf:
        layout, group, keep = self.layout, self.group, self.group["decay"]
        self.gammas = layout.decays(self.decays)
        thetas, momenta, moments = (row.data_ptr() for row in table.others)
        return Shelf(
            chunks=layout.chunks.data_ptr(),
            grads=table.grads.data_ptr(),
            thetas=thetas,
            momenta=momenta if group["momentum"] else None,
            moments=moments if self._adaptive else None,
            columns=None if self.groups is None else self.groups.data_ptr(),
            lines=self.lines.table.data_ptr(),
            places=self.lines.places.data_ptr(),
            fractions=self.fractions.data_ptr(),
            decays=self.gammas.data_ptr(),
            coupled=self.has_decay,
            decoupled=self.has_decoupled_decay,
            rank=self.rank,
            chunk=layout.chunk,
            threads=torch.get_num_threads(),
            sign=self.sign,
            keep=keep,
            fresh=1 - keep,  # of more digits than the kernels have
            weight=float(self.moment.weight_of_average(keep)) if group["bias_correction"] else 1.0,
            eps=group["eps"],
            share=1 / self.fictitious,
        )

"""Which form of group gradients each player gets, and how it is built from the tape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ocnopt import whole_step
from ocnopt.curvature import Adaptive, Identity
from ocnopt.curvature.tally import Tally, length_of
from ocnopt.distributed import World
from ocnopt.fused import support
from ocnopt.gradients import Columns, Explicit, GroupGradients, Shared
from ocnopt.gram import Gram, GramRow
from ocnopt.groups import Part, Samples
from ocnopt.hosts import Host
from ocnopt.layers.base import Call, compute_dtype, spread
from ocnopt.multi import mask_, masked
from ocnopt.once import nothing_else
from ocnopt.players import Player, Use
from ocnopt.records import Folded, Pass, Record
from ocnopt.shelves import Shelf
from ocnopt.trees import mapped

#: whose metrics can be applied to parts of tensors, and that write to no gradient
_DIAGONAL = Identity, Adaptive


class Calls:
    """The records of a step, by player."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.by_module: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            if 0 in record.h or record.tallies or (record.h and isinstance(record.module, Host)):
                self.by_module[record.name].append(record)

    def __contains__(self, module_name: str) -> bool:
        return module_name in self.by_module

    def records(self, player: Player) -> list[Record]:
        return [record for name in player.module_names if name in self for record in self.by_module[name]]

    def looked_at(self, player: Player) -> bool:
        """Do the records tell what its layer saw? Those of a host only do if it was asked."""
        inside = {use.module_name for uses in player.uses for use in uses if use.host is not None}
        return all(record.inner is not None for record in self.records(player) if record.name in inside)

    def by_pass(self, player: Player) -> dict[Pass, list[Call]]:
        """The calls of a player's modules, by forward pass; none if a host was not asked for them."""
        executions: dict[Pass, list[list[Call]]] = defaultdict(list)
        for record, use in self._uses(player) if self.looked_at(player) else ():
            if use.path not in record.tallies:
                executions[record.origin].append(record.calls(use.path))
        together = as_one_solve if player.inside else _joined
        return {this: together(calls) for this, calls in executions.items()}

    def tallies(self, player: Player) -> list[Tally]:
        """Of the forward passes in which its calls have been added up."""
        found = [record.tallies[use.path] for record, use in self._uses(player) if use.path in record.tallies]
        return list({id(tally): tally for tally in found}.values()) if self.looked_at(player) else []

    def _uses(self, player: Player) -> list[tuple[Record, Use]]:
        """The records of a player's modules, each with one of the uses that it is about."""
        one = {use.module_name: use for uses in player.uses for use in uses}
        return [(record, one[record.name]) for record in self.records(player)]

    def why_unusable(self, player: Player, split: bool) -> str | None:
        """Why the calls of a player cannot be read sample by sample, or ``None`` if they can. ``split``: is it for
        groups of samples?
        """
        why = player.why_no_adapter()
        if why is not None:
            return why
        uses = self._uses(player)
        if not uses or not all(use.path in record.tallies or record.calls(use.path) for record, use in uses):
            return "its calls were not seen"
        whole = split or not player.curvature.takes_tallies
        for record, use in uses:
            if whole and use.path in record.tallies:
                return "more is asked of its calls than before the backward pass, which has added them up"
            why = _why_unusable_inside(record, use) if use.path else _why_unusable(record)
            if why is None and use.adapter is not None:
                refusals = (use.adapter.call_refusal(call) for call in record.calls(use.path))
                why = next((each for each in refusals if each is not None), None)
            if why is not None:
                return why
        return None


def _joined(executions: Sequence[Sequence[Call]]) -> list[Call]:
    return [call for calls in executions for call in calls]


def as_one_solve(solves: Sequence[Sequence[Call]]) -> list[Call]:
    """The solves of one forward pass as parts of a single one: factors do not depend on how a trajectory is cut."""
    lengths = [length_of(calls) for calls in solves]
    parts = zip(solves, lengths, strict=True)
    return [replace(call, share=call.share * length / sum(lengths)) for calls, length in parts for call in calls]


_ROWS = "dimension 0 of its input or output does not run over the samples"


def _why_unusable(record: Record) -> str | None:
    if not record.rows_are_samples():
        return _ROWS
    if len(record.h) > 1:
        return "the loss depends on more than its first output"
    return "its input was overwritten in place" if record.overwritten() else None


def _why_unusable_inside(record: Record, use: Use) -> str | None:
    """Inside a host every call has its own adjoint; samples keep their places if they come to the host in dimension 0.
    Its output may have another one in front, of times, say.
    """
    if use.path in record.strays:
        return f"it is also called outside of {record.name or type(record.module).__name__}, where it is not seen"
    batch, mixed = record.origin.batch, record.origin.mixed_inputs
    sizes = {t.shape[:1] for call in record.calls(use.path) for t in (call.x, call.h)}
    return _ROWS if record.name in mixed or (batch is not None and not sizes <= {(batch,)}) else None


def _part_of(record: Record, use: Use) -> tuple[slice, ...]:
    assert use.adapter is not None
    return use.adapter.parts(record.call()).get(use.own_name, ())


def _uses(shelf: Shelf) -> list[list[Use]]:
    """Of each parameter."""
    return [uses for player in shelf.players for uses in player.uses]


def _lasting(call: Call, G: Tensor) -> Tensor:
    return G if call.duration == 1 else call.duration * G


class Forms:
    """Chooses and builds the group gradients of players."""

    def __init__(
        self,
        records: Sequence[Record],
        samples: Samples,
        maximize: bool = False,
        folded: Folded | None = None,
        world: World | None = None,
        seen: Set[int] = frozenset(),
    ) -> None:
        """``folded``: passes that are no longer on the tape; ``world``: the
        processes that share the batch; ``seen``: ids of players whose calls are of use, here or there.
        """
        self.calls, self.samples, self.folded = Calls(records), samples, folded
        self.maximize, self.world, self.seen = maximize, world or World(), seen
        self.ok: Tensor | None = None  # false if the step must leave no trace
        self._columns: dict[tuple[int, str], dict[str, Tensor]] = {}
        self._of_shelves: dict[int, Columns] = {}

    def calls_of(self, player: Player) -> list[tuple[Part, list[Call]]]:
        """By forward pass, with the rows that are its own."""
        return [(self.samples.of(this), calls) for this, calls in self.calls.by_pass(player).items()]

    def tallies_of(self, player: Player) -> list[Tally]:
        return self.calls.tallies(player)

    def kind(self, player: Player) -> type[GroupGradients]:
        rank = self.samples.groups.rank
        if rank == 1 or id(player) not in self.seen:
            return Shared
        records = self.calls.records(player)
        alone = len(records) == 1 and self.samples.of(records[0].origin).groups == self.samples.groups
        alone = alone and not records[0].columns
        alone = alone and isinstance(player.curvature, Identity) and not player.inside and self.world.size == 1
        kernels = support.splits_on(player.params[0].device, rank) and support.are_wanted(player.group)
        alone = alone and not kernels and not player.group["fused"]
        assert player.adapter is not None
        return Gram if alone and player.adapter.prefers_gram(records[0].call(), rank) else Explicit

    def build(self, shelf: Shelf, grads: list[Tensor], squares: Tensor, fractions: Tensor) -> GroupGradients:
        """``grads``: what this process holds of the gradients of a shelf; ``squares``: of each, the sum of squares."""
        wide = compute_dtype(shelf.params[0].dtype)
        grads = [g if g.dtype == wide else g.to(wide) for g in grads]
        ok = self.ok if self.ok is None else self.ok.to(grads[0].device)
        if ok is not None and not self._are_fine(shelf, ok):
            grads = masked(grads, ok)
        if self.maximize:
            torch._foreach_neg_(grads)
        fractions = fractions.to(grads[0])
        if shelf.kind is Shared:
            of_use = ok is not None and isinstance(shelf.curvature, Identity)
            return Shared(grads, fractions, self._masked(squares) if of_use else None)
        if shelf.kind is Explicit:
            columns = self._all_cleaned(self.columns_of(shelf).tensors)
            self.world.sum_(columns)
            return Explicit.of(columns, grads, fractions)
        return self._gram(shelf.players, None if self._are_sums(shelf) else grads, fractions)

    def _parts(self, shelf: Shelf) -> dict[int, tuple[slice, ...]]:
        """Of these parameters, what their columns are kept of where that is not all."""
        if self.folded is not None:  # columns of earlier passes are whole
            return {}
        parts = {i: self._part(*uses) for i, uses in enumerate(_uses(shelf)) if len(uses) == 1}
        return {i: part for i, part in parts.items() if part}

    def _part(self, use: Use) -> tuple[slice, ...]:
        """Of a parameter that is used once."""
        records = self.calls.by_module.get(use.module_name, ())
        return () if use.path or len(records) != 1 else _part_of(records[0], use)

    def _are_fine(self, shelf: Shelf, ok: Tensor) -> bool:
        """Is it known here that there is nothing to mask, and is nobody going to write to the gradients? A copy of all
        of them takes as long as a good part of a step.
        """
        read_only = type(shelf.curvature) in _DIAGONAL and not self.maximize
        return read_only and whole_step.may_look(ok) and bool(ok)

    def _are_sums(self, shelf: Shelf) -> bool:
        """Is it known that the gradients of all its parameters are what the calls add up to?"""
        return all(self._is_sum(p, uses) for p, uses in zip(shelf.params, _uses(shelf), strict=True))

    def _is_sum(self, p: Tensor, uses: Sequence[Use]) -> bool:
        records = [record for use in uses for record in self.calls.by_module.get(use.module_name, ())]
        alone = len(records) == len(uses) == 1 and self.folded is None and self.world.size == 1
        # a factor that was found by comparing other gradients with what they were may not be that of this one
        alone = alone and records[0].origin.scale is None
        return alone and nothing_else(records[0], uses[0].own_name, p.grad)

    def columns_of(self, shelf: Shelf, in_parts: bool = False) -> Columns:
        """Of all its players, as they are. ``in_parts``: parts of them are enough."""
        found = self._of_shelves.get(id(shelf))
        if found is None:
            parts, tensors = self._parts(shelf) if in_parts else {}, list[Tensor]()
            for player in shelf.players:
                tensors += self.columns(player, [len(tensors) + i in parts for i in range(len(player.params))])
            found = self._of_shelves[id(shelf)] = Columns(tensors, parts)
        return found if in_parts else found.whole(shelf.params)

    def columns(self, player: Player, enough: Sequence[bool] | None = None) -> list[Tensor]:
        """``[r, *shape]`` of each parameter of a player, as the tape tells it; ``enough``: is a part of it?"""
        found = []
        for p, uses, part in zip(player.params, player.uses, enough or [False] * len(player.params), strict=True):
            parts = [self._gradient(use, None if part else p.shape) for use in uses if use.module_name in self.calls]
            before = None if self.folded is None else self.folded.of(p, self.samples)
            parts += [] if before is None else [before]
            found.append(self._summed(parts) if parts else self._nothing(p))
        return found

    def _nothing(self, p: Tensor) -> Tensor:
        """Of a parameter that is used by other processes only."""
        return torch.zeros(self.samples.groups.rank, *p.shape, dtype=compute_dtype(p.dtype), device=p.device)

    def _gram(self, players: Sequence[Player], grads: Sequence[Tensor] | None, fractions: Tensor) -> Gram:
        records = {id(record): record for player in players for record in self.calls.records(player)}
        calls = dict(zip(records, self._cleaned_calls([record.call() for record in records.values()]), strict=True))
        rows = []
        for player in players:  # the identity metric: one parameter a player, one record
            (record,) = self.calls.records(player)
            assert player.adapter is not None
            rows.append(GramRow(player.adapter, calls[id(record)], player.own_names[0]))
        return Gram.of(rows, grads, self.samples.groups, fractions)

    def _cleaned_calls(self, calls: Sequence[Call]) -> list[Call]:
        """Copies, unless there is nothing to clean."""
        if self._is_fine:
            return [replace(call, h=-call.h if self.maximize else call.h, memo={}) for call in calls]
        found = []
        for call in calls:
            args, kwargs = mapped(self._masked, (call.args, call.kwargs))
            found.append(replace(call, args=args, kwargs=kwargs, h=self._cleaned(call.h), memo={}))
        return found

    def _gradient(self, use: Use, shape: torch.Size | None) -> Tensor:
        """Group gradients of one parameter as one module uses it, summed over the module's calls; of its ``shape``, or
        of a part.
        """
        total = None
        for record in self.calls.by_module[use.module_name]:
            G = self._of_record(record, use).pop(use.own_name)
            if shape is not None and not use.path:
                G = spread(G, _part_of(record, use), shape)
            total = self.samples.of(record.origin).add(total, G)
        assert total is not None
        return total

    def _of_record(self, record: Record, use: Use) -> dict[str, Tensor]:
        """Columns of the groups that its pass has samples of."""
        key = id(record), use.path
        if key not in self._columns:
            assert use.adapter is not None
            groups = self.samples.of(record.origin).groups
            found = None if use.path else record.split(groups)
            if found is None and not use.path:
                found = use.adapter.part_gradients(record.call(), groups)
            elif found is None:
                calls = [
                    {n: _lasting(call, G) for n, G in use.adapter.group_gradients(call, groups).items()}
                    for call in record.calls(use.path)
                ]
                found = {n: self._summed([each[n] for each in calls]) for n in calls[0]}
            self._columns[key], record.columns = found, {}  # nobody else holds them
        return self._columns[key]

    def _all_cleaned(self, tensors: list[Tensor]) -> list[Tensor]:
        """The same, all at once; may overwrite them."""
        if not self._is_fine and self.ok is not None:
            tensors = [t.contiguous() for t in tensors]
            mask_(tensors, self.ok.to(tensors[0].device))
        return list(torch._foreach_neg(tensors)) if self.maximize else tensors

    @cached_property
    def _is_fine(self) -> bool:
        """Is it known that there is nothing to mask? Nobody waits for a CPU."""
        return self.ok is None or (whole_step.may_look(self.ok) and bool(self.ok))

    def _masked(self, t: Tensor) -> Tensor:
        if self.ok is None or not t.is_floating_point():
            return t
        return torch.where(self.ok.to(t.device), t, 0)

    def _cleaned(self, t: Tensor) -> Tensor:
        return -self._masked(t) if self.maximize else self._masked(t)

    @staticmethod
    def _summed(tensors: Sequence[Tensor]) -> Tensor:
        total = tensors[0]
        for t in tensors[1:]:
            total = total + t
        return total

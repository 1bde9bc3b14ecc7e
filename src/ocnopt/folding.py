"""Gradient accumulation at rank > 1 without the tapes of all passes: what is kept of a pass are its group gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ocnopt.distributed import World
from ocnopt.forms import Forms
from ocnopt.groups import Samples
from ocnopt.players import Player
from ocnopt.records import Folded, Pass, Record

_ALL = Samples()  # where nobody asks which


def samples_of(
    folded: Folded | None, passes: Iterable[Pass], rank: int | str, accumulate: int, world: World, over: bool = True
) -> Samples:
    """The samples of a step: of passes that are folded, and of those still on the tape. Unless all passes are ``over``,
    the groups are those of this process, and nobody else is asked.
    """
    rows: dict[object, int] = {} if folded is None else dict(enumerate(folded.rows))
    rows |= {this: this.batch or 0 for this in passes}
    if rank == 1:
        return Samples(1, rows) if rows else _ALL
    if accumulate > 1:
        planned = [next((n for n in rows.values() if n), 0) * accumulate] * world.size
    else:
        planned = [total for (total,) in world.gather_ints([sum(rows.values())])]
    if not over or world.size == 1:
        return Samples(rank, rows, planned, world.rank)
    if accumulate > 1 and rank == "full":
        world.must_agree(str(planned), "begin their steps with passes of different sizes, where rank is 'full'")
    return Samples(rank, rows, planned, world.rank, lambda sizes: _sums(world.gather_ints(sizes)))


def _sums(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]


def fold(folded: Folded, players: Sequence[Player], records: Sequence[Record], samples: Samples) -> None:
    """Add the group gradients of these records. ``samples``: of their passes and all earlier ones."""
    forms = Forms(records, samples)
    for player in players:
        if not forms.calls.records(player):
            continue
        if (why := forms.calls.why_unusable(player, True)) is not None:
            folded.whole |= dict.fromkeys(player.params, why)
            continue
        for p, G in zip(player.params, forms.columns(player), strict=True):
            folded.columns[p] = _sum(folded.columns.get(p), G)
    folded.rows += [this.batch or 0 for this in {record.origin: None for record in records}]


def _sum(total: Tensor | None, G: Tensor) -> Tensor:
    """Later passes are in later groups, so there are more and more columns."""
    if total is None:
        return G
    G[: len(total)] += total
    return G

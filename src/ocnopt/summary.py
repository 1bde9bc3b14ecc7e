"""One table: which layer gets which treatment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ocnopt.players import Player
from ocnopt.stages import Stages


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, two spaces apart."""
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def summarise(players: Sequence[Player], stages: Stages | None, split: bool, fallbacks: Mapping[str, str]) -> str:
    """``split``: are gradients split into groups of samples? ``fallbacks``: what the last step found out, by the
    names of players.
    """
    rows = []
    for player in players:
        adapter = type(player.adapter).__name__ if player.adapter else "–"
        count = sum(p.numel() for p in player.params)
        stage = "–" if stages is None or id(player) not in stages.seat_of else str(stages.of(player))
        notes = [*player.notes, *_group_notes(player, split, fallbacks)]
        if not any(p.requires_grad for p in player.params):
            notes = ["frozen"]
        rows.append((player.name, adapter, player.curvature.name, stage, f"{count:,}", "; ".join(notes)))
    total = sum(p.numel() for player in players for p in player.params)
    body = table(("layer", "adapter", "curvature", "stage", "parameters", "note"), rows)
    return f"{body}\n{total:,} parameters in {len(players)} players"


def _group_notes(player: Player, split: bool, fallbacks: Mapping[str, str]) -> list[str]:
    if not split:
        return []
    why = player.why_no_adapter() or fallbacks.get(player.name)
    if why:
        return [f"{why}: groups share p.grad"]
    if player.adapter is not None and player.module is not None and player.adapter.couples_samples(player.module):
        return ["batch statistics couple the samples: groups by row, exact at rank 1"]
    return []

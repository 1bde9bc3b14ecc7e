"""``opt.step()`` from a graph of itself. Graphs are emulated here; tests/gpu has the real ones."""

from __future__ import annotations

from typing import Any

import pytest
from tests.emulated import Graph, emulate
from tests.replaying import GAMES, assert_same, both, data


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    Graph.replays = 0


@pytest.mark.parametrize("kind", ["chain", "residual"])
@pytest.mark.parametrize("game", GAMES, ids=lambda g: "-".join(map(str, g.values())))
def test_the_numbers_are_those_of_ordinary_steps(kind: str, game: dict[str, Any]) -> None:
    ours, theirs, reasons = both(kind, data(kind, 30), **game)
    assert_same(ours, theirs)
    assert reasons.count(None) >= 9, reasons
    assert Graph.replays == reasons.count(None)

"""P processes with a part of the batch each take the steps of one process with all of it."""

from __future__ import annotations

from tests.dist import checks_ddp, checks_games, two


def test_two_processes_that_share_each_batch() -> None:
    two.run([*checks_ddp.CHECKS, *checks_games.CHECKS])

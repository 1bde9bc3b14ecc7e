"""P processes with a part of the batch and of each parameter take the steps of one process with all of them."""

from __future__ import annotations

from tests.dist import checks_fsdp, two


def test_two_processes_that_share_each_parameter() -> None:
    two.run(checks_fsdp.CHECKS)

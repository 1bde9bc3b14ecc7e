"""P processes with a part of the batch each take the steps of one process with all of it."""

from __future__ import annotations

import pytest
from tests.dist import checks_ddp, checks_games, two

CHECKS = {f"{m.__name__.rpartition('_')[2]}: {c.__name__}": c for m in (checks_ddp, checks_games) for c in m.CHECKS}


@pytest.fixture(scope="module")
def errors() -> dict[str, list[str]]:
    return two.run(list(CHECKS.items()))


@pytest.mark.parametrize("name", CHECKS)
def test_in_two_processes(name: str, errors: dict[str, list[str]]) -> None:
    assert not errors[name], "\n".join(errors[name])

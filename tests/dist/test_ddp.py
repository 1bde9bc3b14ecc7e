"""P processes with a part of the batch each take the steps of one process with all of it."""

from __future__ import annotations

import pytest
from tests.dist import checks_ddp, two

NAMES = [check.__name__ for check in checks_ddp.CHECKS]


@pytest.fixture(scope="module")
def errors() -> dict[str, list[str]]:
    return two.run(list(zip(NAMES, checks_ddp.CHECKS, strict=True)))


@pytest.mark.parametrize("name", NAMES)
def test_in_two_processes(name: str, errors: dict[str, list[str]]) -> None:
    assert not errors[name], "\n".join(errors[name])

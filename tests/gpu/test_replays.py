"""``opt.step()`` from a CUDA graph of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.replaying import GAMES, assert_same, both, data

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.mark.parametrize("kind", ["chain", "residual"])
@pytest.mark.parametrize("game", GAMES, ids=lambda g: "-".join(map(str, g.values())))
def test_the_numbers_are_those_of_ordinary_steps(kind: str, game: dict[str, Any]) -> None:
    # where a gradient is next to nothing, adaptive curvature with a small ε makes much of its rounding
    ours, theirs, reasons = both(kind, data(kind, 30, device="cuda"), device="cuda", eps=0.1, **game)
    assert reasons.count(None) >= 9, reasons
    assert_same(ours, theirs, rtol=1e-3, atol=1e-4)

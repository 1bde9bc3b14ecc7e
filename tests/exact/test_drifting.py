"""On a CPU, momentum with the identity metric moves the parameters as it is: in one pass, with the same numbers."""

from __future__ import annotations

from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch
from tests.toys import batches, mlp, train, values
from torch import Tensor

from ocnopt import OCNOpt
from ocnopt.bucket import Bucket

OPTIONS: list[dict[str, Any]] = [{}, {"ema": False}, {"bias_correction": False}, {"players": 2}, {"rank": 3}]


def run(options: dict[str, Any], drifts: bool, bad: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = mlp()
    fixed: dict[str, Any] = {"curvature": "identity", "feedback": "nonlinear", "momentum": 0.9}
    opt = OCNOpt(model.parameters(), 0.3, model=model, **fixed, **options)
    seen = batches(5)
    if bad:
        seen[2] = (seen[2][0] * torch.inf, seen[2][1])
    if drifts:
        with patch.object(Bucket, "_drift", autospec=True, side_effect=Bucket._drift) as moved:
            train(model, opt, seen)
        assert moved.call_count >= len(seen)
    else:
        with patch.object(Bucket, "_drifts", new_callable=PropertyMock, return_value=False):
            train(model, opt, seen)
    return [*values(model), *(own["momentum"] for own in opt.state.values())]


@pytest.mark.parametrize("bad", [False, True], ids=["", "a step is skipped"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_same_numbers(options: dict[str, Any], bad: bool) -> None:
    torch.testing.assert_close(run(options, True, bad), run(options, False, bad), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "options", [{"momentum": 0.0}, {"nesterov": True, "ema": False}, {"weight_decay": 0.1}], ids=str
)
def test_what_moves_otherwise(options: dict[str, Any]) -> None:
    """Nothing, a look ahead, or decay goes along."""
    model = mlp()
    fixed = {"curvature": "identity", "feedback": "nonlinear", "momentum": 0.9}
    opt = OCNOpt(model.parameters(), 0.3, model=model, **(fixed | options))
    with patch.object(Bucket, "_drift", side_effect=AssertionError):
        train(model, opt, batches(2))

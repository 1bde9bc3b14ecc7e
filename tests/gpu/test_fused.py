"""Fused kernels on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.fused.checks import *  # noqa: F403  # tests/fused/test_interpreted.py runs the same without a GPU
from tests.fused.checks_groups import *  # noqa: F403
from tests.fused.checks_layers import *  # noqa: F403
from tests.fused.checks_sums import *  # noqa: F403
from torch import nn

from ocnopt import OCNOpt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("curvature", ["identity", "adaptive"])
def test_a_step_holds_nothing_of_the_size_of_the_parameters(curvature: str) -> None:
    model = nn.Linear(2000, 2000, device="cuda")
    opt = OCNOpt(model.parameters(), curvature=curvature, fused=True)
    for _ in range(2):
        opt.zero_grad()
        model(torch.randn(4, 2000, device="cuda")).square().mean().backward()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        opt.step()
    assert torch.cuda.max_memory_allocated() - before < model.weight.numel()  # a quarter of its bytes

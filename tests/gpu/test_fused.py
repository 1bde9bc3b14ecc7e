"""Fused kernels on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.fused.checks import *  # noqa: F403  # tests/fused/test_interpreted.py runs the same without a GPU
from tests.fused.checks_groups import *  # noqa: F403
from tests.fused.checks_layers import *  # noqa: F403
from tests.fused.checks_layers import network as network_with_batch_norms
from tests.fused.checks_sums import *  # noqa: F403
from tests.fused.networks import without_kernels
from tests.toys import values
from torch import nn

from ocnopt import OCNOpt, graphed_step

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


def test_batch_norms_in_a_graph_of_a_whole_step() -> None:
    """Their gradients, and so all steps, are those of plain operations up to the rounding of TF32."""
    models = [network_with_batch_norms() for _ in range(2)]
    chosen = {"curvature": "identity", "rank": 4, "feedback": "nonlinear"}
    plain, ours = (OCNOpt(m.parameters(), 0.1, model=m, graphed=False, **chosen) for m in models)
    plain.param_groups[0]["fused"] = False
    draw = torch.Generator().manual_seed(0)
    data = [
        (torch.randn(10, 2, 7, 7, generator=draw).cuda(), torch.randn(10, 3, generator=draw).cuda()) for _ in range(8)
    ]
    step = graphed_step(models[1], nn.functional.mse_loss, ours, data[0])
    for x, y in data:
        with without_kernels():
            plain.zero_grad()
            nn.functional.mse_loss(models[0](x), y).backward()
            plain.step()
        step(x, y)
    assert step.reason is None
    torch.testing.assert_close(values(models[1]), values(models[0]), rtol=1e-2, atol=2e-3)

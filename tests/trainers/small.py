"""What the tests of the trainers share: a small encoder, some verses, and the plain loop that each trainer must equal.

A trainer puts things around the optimizer, the model and the step. None of it may change a single bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from examples.verses import Encoder, load
from tests.toys import assert_identical, state_of, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset

from ocnopt import OCNOpt

STEPS, BATCH = 3, 12
CLIP = 0.05  # the gradients are longer

#: what reads nothing but p.grad, what reads single samples, what looks at layers, what runs the model again, and all
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "rank": {"rank": 3},
    "kronecker": {"curvature": "kronecker"},
    "nonlinear": {"feedback": "nonlinear"},
    "everything": {"rank": 3, "curvature": "kronecker", "feedback": "nonlinear", "bellman": "paper"},
}

modes = pytest.mark.parametrize("mode", MODES)


def encoder() -> Encoder:
    """Without dropout: trainers draw random numbers of their own."""
    torch.manual_seed(0)
    model = Encoder(load()[2], width=16)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def optimizer(model: nn.Module, mode: str) -> OCNOpt:
    return OCNOpt(model.parameters(), lr=0.02, model=model, refresh_every=2, **MODES[mode])


def verses() -> Dataset[tuple[Tensor, ...]]:
    """From all books, in a fixed order."""
    data = load()[0]
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    return Subset(data, order[: STEPS * BATCH].tolist())


def batches(accumulate: int = 1) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(verses(), batch_size=BATCH // accumulate)


def plain(
    mode: str, *, cast: torch.dtype | None = None, accumulate: int = 1, epochs: int = 1
) -> tuple[Encoder, OCNOpt]:
    """The loop without a trainer. A cast to float16 brings a scaler."""
    model = encoder()
    opt = optimizer(model, mode)
    scaler = torch.amp.GradScaler("cpu", enabled=cast == torch.float16)
    for _ in range(epochs):
        for n, (x, y) in enumerate(batches(accumulate), start=1):
            with torch.autocast("cpu", cast, enabled=cast is not None):
                logits = model(x)
            scaler.scale(cross_entropy(logits.float(), y) / accumulate).backward()
            if n % accumulate == 0:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
    return model, opt


def assert_same(ours: tuple[nn.Module, OCNOpt], theirs: tuple[nn.Module, OCNOpt]) -> None:
    assert_identical(values(ours[0]), values(theirs[0]))
    assert_identical(state_of(ours[1]), state_of(theirs[1]))
    assert any(state_of(ours[1])), "nothing was compared"

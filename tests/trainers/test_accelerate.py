"""Accelerate: wrapped optimizer, model whose forward is replaced, accumulation, clipping, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainers.small import CLIP, assert_same, batches, encoder, modes, optimizer, plain
from torch.nn.functional import cross_entropy

pytest.importorskip("accelerate", reason="needs ocnopt[trainers]")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Precision and accumulation are settings of the whole process there."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Training:
    def __init__(self, mode: str, precision: str = "no", accumulate: int = 1) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate)
        model = encoder()
        self.made = model, optimizer(model, mode)
        self.model, self.opt, self.data = self.accelerator.prepare(*self.made, batches(accumulate))

    def epoch(self) -> Any:
        for x, y in self.data:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(cross_entropy(self.model(x), y))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                self.opt.step()
                self.opt.zero_grad()
        return self.made


@modes
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_it_is_the_plain_loop(mode: str, precision: str) -> None:
    assert_same(Training(mode, precision).epoch(), plain(mode, cast=torch.bfloat16 if precision == "bf16" else None))


@modes
def test_accumulated_gradients(mode: str) -> None:
    assert_same(Training(mode, accumulate=3).epoch(), plain(mode, accumulate=3))


@modes
def test_a_checkpoint_brings_back_everything(mode: str, tmp_path: Path) -> None:
    first = Training(mode)
    first.epoch()
    first.accelerator.save_state(str(tmp_path))
    second = Training(mode)
    second.accelerator.load_state(str(tmp_path))
    assert_same(second.epoch(), plain(mode, epochs=2))

"""Lightning: forward and backward inside ``step(closure)``, zero_grad between them, clipping, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainers.small import CLIP, assert_same, batches, encoder, modes, optimizer, plain
from torch import Tensor
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt

L = pytest.importorskip("lightning", reason="needs ocnopt[trainers]")

pytestmark = [
    # each is Lightning's own: how it reads its checkpoints and trees, and that one process reads the data
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


class Classifier(L.LightningModule):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode, self.encoder = mode, encoder()

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        x, y = batch
        return cross_entropy(self.encoder(x).float(), y)

    def configure_optimizers(self) -> OCNOpt:
        self.opt = optimizer(self.encoder, self.mode)
        return self.opt


def trainer(epochs: int = 1, **options: Any) -> Any:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return L.Trainer(max_epochs=epochs, accelerator="cpu", gradient_clip_val=CLIP, **quiet, **options)


def fit(mode: str, file: Path | None = None, **options: Any) -> Any:
    module = Classifier(mode)
    trainer(**options).fit(module, batches(options.get("accumulate_grad_batches", 1)), ckpt_path=file)
    return module.encoder, module.opt


@modes
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_is_the_plain_loop(mode: str, precision: str) -> None:
    assert_same(fit(mode, precision=precision), plain(mode, cast=torch.bfloat16 if precision == "bf16-mixed" else None))


@modes
def test_scaled_gradients(mode: str) -> None:
    """Divided by the scaler, then clipped, then the step: with float16 nothing else would do."""
    plugin = L.pytorch.plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    assert_same(fit(mode, plugins=[plugin]), plain(mode, cast=torch.float16))


@modes
def test_accumulated_gradients(mode: str) -> None:
    assert_same(fit(mode, accumulate_grad_batches=3), plain(mode, accumulate=3))


@modes
def test_a_checkpoint_brings_back_everything(mode: str, tmp_path: Path) -> None:
    first, file = trainer(), tmp_path / "checkpoint.ckpt"
    first.fit(Classifier(mode), batches())
    first.save_checkpoint(file)
    assert_same(fit(mode, file, epochs=2), plain(mode, epochs=2))

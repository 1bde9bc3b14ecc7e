"""The same encoder trained by Lightning.

Three epochs; after the second everything is saved, made anew and loaded. Needs ``ocnopt[trainers]``.

    python examples/with_lightning.py
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from verses import Encoder, load

from ocnopt import OCNOpt

Batch = tuple[Tensor, Tensor]


class Classifier(L.LightningModule):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.encoder = Encoder(words)

    def training_step(self, batch: Batch, number: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self.encoder(x), y)
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Batch, number: int) -> None:
        x, y = batch
        self.log("accuracy", (self.encoder(x).argmax(1) == y).float().mean())

    def on_train_epoch_end(self) -> None:
        seen = self.trainer.callback_metrics
        print(f"epoch {self.current_epoch + 1}: loss {seen['loss']:.3f}, test accuracy {seen['accuracy']:.0%}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # where the model is needed, it is the module that training_step calls: model=self.encoder
        return OCNOpt(self.parameters())  # was: torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    train, test, words = load()
    data = DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=len(test))
    file = Path(tempfile.mkdtemp()) / "checkpoint.ckpt"
    trainer = partial(L.Trainer, gradient_clip_val=1.0, logger=False, enable_checkpointing=False)
    first = trainer(max_epochs=2, enable_progress_bar=False)
    first.fit(Classifier(words), *data)
    first.save_checkpoint(file)
    print("resumed")
    trainer(max_epochs=3, enable_progress_bar=False).fit(Classifier(words), *data, ckpt_path=file)

"""The same encoder trained by Hugging Face's Trainer, with accumulated gradients.

Three epochs; after the second everything is made anew and loaded. Needs ``ocnopt[trainers]``.

    python examples/with_transformers.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import EvalPrediction, Trainer, TrainingArguments, get_constant_schedule, set_seed
from verses import Encoder, load

from ocnopt import OCNOpt

train, test, words = load()
folder = tempfile.mkdtemp()


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(words)

    def forward(self, words: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.encoder(words)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def accuracy(found: EvalPrediction) -> dict[str, float]:
    logits, labels = torch.as_tensor(found.predictions), torch.as_tensor(found.label_ids)
    return {"accuracy": float((logits.argmax(1) == labels).float().mean())}


def trainer(epochs: int) -> Trainer:
    model = Classifier()
    opt = OCNOpt(model.parameters())  # was: torch.optim.AdamW(model.parameters(), lr=1e-3)
    per_epoch: Any = dict.fromkeys(("eval_strategy", "logging_strategy", "save_strategy"), "epoch")
    sizes: Any = {"num_train_epochs": epochs, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}
    return Trainer(
        model,
        TrainingArguments(folder, **sizes, **per_epoch),
        train_dataset=[{"words": x, "labels": y} for x, y in zip(*train.tensors, strict=True)],
        eval_dataset=[{"words": x, "labels": y} for x, y in zip(*test.tensors, strict=True)],
        compute_metrics=accuracy,
        optimizers=(opt, get_constant_schedule(opt)),
    )


if __name__ == "__main__":
    set_seed(0)
    trainer(epochs=2).train()
    print("resumed")
    trainer(epochs=3).train(resume_from_checkpoint=True)

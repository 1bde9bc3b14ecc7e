"""The same encoder in a loop with Accelerate: mixed precision, accumulated gradients.

Three epochs; after the second everything is saved, made anew and loaded. Needs ``ocnopt[trainers]``.

    python examples/with_accelerate.py
"""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from verses import Encoder, load

from ocnopt import OCNOpt

train, test, words = load()


class Training:
    def __init__(self) -> None:
        self.accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
        model = Encoder(words)
        opt = OCNOpt(model.parameters())  # was: torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = DataLoader(train, batch_size=16, shuffle=True)
        self.model, self.opt, self.batches = self.accelerator.prepare(model, opt, batches)

    def epoch(self) -> str:
        self.model.train()
        losses = []
        for x, y in self.batches:
            with self.accelerator.accumulate(self.model):
                loss = cross_entropy(self.model(x), y)
                self.accelerator.backward(loss)
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.opt.step()
                self.opt.zero_grad()
                losses.append(loss.item())
        self.model.eval()
        x, y = (t.to(self.accelerator.device) for t in test.tensors)
        with torch.no_grad():
            accuracy = (self.model(x).argmax(1) == y).float().mean()
        return f"loss {sum(losses) / len(losses):.3f}, test accuracy {accuracy:.0%}"


if __name__ == "__main__":
    set_seed(0)
    folder = tempfile.mkdtemp()
    training = Training()
    for n in (1, 2):
        print(f"epoch {n}: {training.epoch()}")
    training.accelerator.save_state(folder)

    training = Training()
    training.accelerator.load_state(folder)
    print(f"epoch 3, resumed: {training.epoch()}")

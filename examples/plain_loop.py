"""A transformer encoder in a plain PyTorch loop.

Three epochs; after the second everything is saved, made anew and loaded.

    python examples/plain_loop.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from verses import Encoder, load

from ocnopt import OCNOpt

train, test, words = load()


def epoch(model: Encoder, opt: OCNOpt) -> float:
    """One pass over the verses; the mean of the losses."""
    model.train()
    losses = []
    for x, y in DataLoader(train, batch_size=32, shuffle=True):
        opt.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def accuracy(model: Encoder) -> float:
    model.eval()
    x, y = test.tensors
    return float((model(x).argmax(1) == y).float().mean())


if __name__ == "__main__":
    torch.manual_seed(0)
    file = Path(tempfile.mkdtemp()) / "checkpoint.pt"
    model = Encoder(words)
    opt = OCNOpt(model.parameters())  # was: torch.optim.AdamW(model.parameters(), lr=1e-3)
    for n in (1, 2):
        print(f"epoch {n}: loss {epoch(model, opt):.3f}, test accuracy {accuracy(model):.0%}")
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)

    model = Encoder(words)  # from here on it could be another process
    opt = OCNOpt(model.parameters())
    saved = torch.load(file, weights_only=True)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    print(f"epoch 3, resumed: loss {epoch(model, opt):.3f}, test accuracy {accuracy(model):.0%}")

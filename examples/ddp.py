"""Kronecker curvature on several processes: each sees a part of every batch, and all take the steps of one that sees it
all.

    python examples/ddp.py
    torchrun --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init_process_group: see "At the end" in docs/parallel.md
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import ocnopt


def load(device: torch.device) -> tuple[Tensor, Tensor]:
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    return x.to(device), y.to(device)


def train(device: torch.device, epochs: int, batch_size: int) -> None:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x, y = load(device)
    torch.manual_seed(0)  # the same network and the same batches everywhere
    net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)).to(device)
    model = DistributedDataParallel(net) if size > 1 else net
    opt = ocnopt.OCNOpt(model.parameters(), lr=0.1, model=model, curvature="kronecker", refresh_every=10)
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(len(x))[: len(x) // batch_size * batch_size].split(batch_size):
            mine = rows[rank::size].to(device)
            opt.zero_grad()
            cross_entropy(model(x[mine]), y[mine]).backward()
            opt.step()
        with torch.no_grad():
            logits = net(x)
        if rank == 0:
            loss, right = cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {100 * right:.1f} % ({size} processes)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    options, local = parser.parse_args(), int(os.environ.get("LOCAL_RANK", "0"))
    here = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if "RANK" in os.environ:
        dist.init_process_group(device_id=here if here.type == "cuda" else None)
    train(here, options.epochs, options.batch_size)  # a function: nothing it made is left when the group is destroyed
    if dist.is_initialized():
        dist.destroy_process_group()

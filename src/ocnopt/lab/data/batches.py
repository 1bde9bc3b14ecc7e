"""Mini-batches whose order depends on (seed, epoch) alone, and which can stop and go on at any batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from ocnopt.lab.data.dataset import Batch, Split


class Batches:
    """Iterate over the mini-batches of a split, epoch after epoch.

    ``for batch in batches`` runs through what is left of the current epoch and then moves to the next one.
    The position is counted when a batch is handed out, so that a checkpoint written after a step goes on
    with the next batch::

        batches = Batches(data.train, batch_size=128, seed=0)
        batches.load_state_dict(checkpoint["batches"])   # when resuming
        while batches.epoch < epochs:
            for batch in batches:
                ...
                checkpoint["batches"] = batches.state_dict()

    Args:
        split: where the samples come from; batches live on its device.
        batch_size: samples per batch, over all processes together.
        seed: of the shuffling. Two objects with the same seed give the same batches in every epoch.
        shuffle: False for evaluation: the samples in their order.
        drop_last: leave out the last batch of an epoch when it is not full.
        rank, world_size: of this process under ``torchrun``. Every process gets an equal share of each
            batch; up to ``world_size - 1`` samples of the last batch are left out to make that possible.
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must lie in 0..world_size-1, got rank {rank} of {world_size}.")
        if batch_size % world_size:
            raise ValueError(f"batch_size {batch_size} must be a multiple of world_size {world_size}.")
        self.split = split
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.rank = rank
        self.world_size = world_size
        usable = len(split) - len(split) % (batch_size if drop_last else world_size)
        self._starts = range(0, usable, batch_size)
        self._usable = usable
        if not self._starts:
            raise ValueError(f"batch_size {batch_size} leaves no batch of {len(split)} samples.")
        self._epoch = 0
        self._position = 0

    def __len__(self) -> int:
        """Batches per epoch."""
        return len(self._starts)

    @property
    def epoch(self) -> int:
        """Number of complete epochs, from 0."""
        return self._epoch + self._position // len(self)

    @property
    def position(self) -> int:
        """Batches already handed out in this epoch."""
        return self._position % len(self)

    def __iter__(self) -> Iterator[Batch]:
        self._epoch, self._position = self.epoch, self.position
        epoch, order = self._epoch, self._order(self._epoch)
        while self._epoch == epoch and self._position < len(self):
            start = self._starts[self._position]
            rows = order[start : min(start + self.batch_size, self._usable)]
            self._position += 1
            yield self.split.batch(self._share(rows))
        self._epoch, self._position = self.epoch, self.position

    def state_dict(self) -> dict[str, int]:
        """Where we are, and what the order depends on. Plain integers."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "samples": len(self.split),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where ``state_dict()`` was taken, possibly with another number of processes."""
        here = self.state_dict()
        for key in ("seed", "batch_size", "samples"):
            if state[key] != here[key]:
                raise ValueError(f"{key} is {here[key]} here but {state[key]} in the saved state.")
        if state["epoch"] < 0 or not 0 <= state["position"] < len(self):
            raise ValueError(f"the saved state has no batch {state['position']} of epoch {state['epoch']}.")
        self._epoch, self._position = state["epoch"], state["position"]

    def _order(self, epoch: int) -> Tensor:
        device = self.split.y.device
        if not self.shuffle:
            return torch.arange(len(self.split), device=device)
        # A fresh generator per epoch: nothing drawn elsewhere can change the order, and any epoch can be
        # reached without running through the ones before it.
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.split))
        return torch.from_numpy(order).to(device)

    def _share(self, rows: Tensor) -> Tensor:
        share = len(rows) // self.world_size
        return rows[self.rank * share : (self.rank + 1) * share]

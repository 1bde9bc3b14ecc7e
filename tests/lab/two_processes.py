"""Started by torchrun in every process: ``ocnopt train``, once for each line of a JSON file of arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from ocnopt.lab import models, trainer
from ocnopt.lab.cli import make_app
from ocnopt.lab.world import join


def normed(input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """A network with running statistics."""
    return nn.Sequential(nn.Linear(input_shape[0], 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, classes))


def main() -> None:
    models.NETWORKS["normed"] = normed
    trainer._EVALUATION = 8  # so that each process evaluates a part
    app = make_app()
    with join(torch.device("cpu")):
        for line in Path(sys.argv[1]).read_text().splitlines():
            code = app(["train", *json.loads(line), "--device", "cpu", "--json"], standalone_mode=False)
            print(f"exit {code}: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()

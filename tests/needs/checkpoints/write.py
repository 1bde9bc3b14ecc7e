"""Writes a checkpoint of the present version, for versions to come. Run it once for each release:

python -m tests.needs.checkpoints.write
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.toys import SOME_GAMES, batches, mlp, name_of, train
from torch import nn

from ocnopt import OCNOpt
from ocnopt.version import __version__

GAMES_OF: dict[str, dict[str, Any]] = {name_of(game): game for game in [*SOME_GAMES, {"feedback": "off"}]}


def make(name: str) -> tuple[nn.Module, OCNOpt]:
    model = mlp()
    return model, OCNOpt(model.parameters(), 0.05, model=model, weight_decay=0.01, refresh_every=4, **GAMES_OF[name])


def go_on(model: nn.Module, opt: OCNOpt) -> list[float]:
    """The steps after the checkpoint."""
    return train(model, opt, batches(3, seed=8))


def run(name: str) -> dict[str, Any]:
    model, opt = make(name)
    train(model, opt, batches(3))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    twin, other = make(name)  # what is saved must not go on
    twin.load_state_dict(weights)
    state = opt.state_dict()
    other.load_state_dict(state)
    return {"weights": weights, "state": state, "losses": go_on(twin, other), "end": twin.state_dict()}


def main() -> None:
    runs = {name: run(name) for name in GAMES_OF}
    torch.save({"version": __version__, "runs": runs}, Path(__file__).parent / f"{__version__}.pt")


if __name__ == "__main__":
    main()

"""A step without a step: ``torch.distributed.checkpoint`` loads into state that is there, and asks for it in this way.

It sets all gradients and learning rates of an optimizer without state to zero and calls ``step``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ocnopt.distributed import World
from ocnopt.groups import Samples
from ocnopt.play import play
from ocnopt.players import Player
from ocnopt.problem import pose
from ocnopt.records import Told
from ocnopt.shelves import Shelves
from ocnopt.stages import Stages


def is_rehearsal(groups: Sequence[Mapping[str, Any]], state: Mapping[Tensor, Mapping[str, Any]]) -> bool:
    if any(state.values()) or any(float(group["lr"]) for group in groups):
        return False
    return not any(bool(p.grad.any()) for group in groups for p in group["params"] if p.grad is not None)


def rehearse(players: list[Player], group: Mapping[str, Any], state: Mapping[Tensor, dict[str, Any]]) -> None:
    """Make the state that a step makes, and leave it as before the first: as after a step that was not finite."""
    bad = torch.tensor(torch.nan)
    stages, samples, world = Stages.in_order(players, None), Samples(), World()
    quiet = {**group, "feedback": "off"}
    problem = pose(players, stages, Told(), state, samples, bad, quiet, world, set(), Shelves())
    play(problem, quiet, None, [], samples, [], world)

"""What an optimizer saves besides what every optimizer of torch saves, and what of it a load must not lose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ocnopt.curvature import BY_NAME, Curvature
from ocnopt.games.alignment import plain
from ocnopt.players import resolve
from ocnopt.version import __version__

if TYPE_CHECKING:
    from ocnopt.optimizer import OCNOpt


def complete(optimizer: OCNOpt, saved: dict[str, Any]) -> None:
    """Nothing but tensors and plain Python: a curvature of somebody's own goes by its name."""
    for group in saved["param_groups"]:
        if isinstance(group["curvature"], Curvature):
            group["curvature"] = group["curvature"].name
        group["alignment"] = plain(group["alignment"])
    saved["version"] = __version__
    if aligner := optimizer._aligner.state_dict():
        saved["game"] = aligner


class Loading:
    """A load in progress. torch casts state to the precision of the weights and knows nothing of objects."""

    def __init__(self, optimizer: OCNOpt) -> None:
        self.optimizer = optimizer
        self.curvatures = [resolve(g["curvature"]) for g in optimizer.param_groups]
        self.rules = [g["alignment"] for g in optimizer.param_groups]
        self.saved: dict[str, Any] = {}

    def begin(self, _: Optimizer, saved: dict[str, Any]) -> None:
        """Look at what is to be loaded before anything is touched."""
        theirs = [g.get("curvature") for g in saved["param_groups"]]
        if theirs and not any("feedback" in g or "curvature" in g for g in saved["param_groups"]):
            raise ValueError("the checkpoint is of another optimizer than OCNOpt; begin with a new state instead")
        self._check_shapes(saved)
        for name, curvature in zip(theirs, self.curvatures, strict=False):  # another number of groups is torch's to say
            if name is not None and name not in BY_NAME and name != curvature.name:
                raise ValueError(f"the checkpoint has curvature {name!r}, this optimizer {curvature.name!r}")
        self.saved = saved

    def _check_shapes(self, saved: dict[str, Any]) -> None:
        order = [i for g in saved["param_groups"] for i in g["params"]]
        params = [p for g in self.optimizer.param_groups for p in g["params"]]
        for i, p in zip(order, params, strict=False):
            for key in ("momentum", "second_moment"):
                value = saved["state"].get(i, {}).get(key)
                if isinstance(value, Tensor) and value.shape != p.shape:
                    raise ValueError(
                        f"the checkpoint is of another network: {key} of parameter {i} has shape {tuple(value.shape)}, "
                        f"the parameter {tuple(p.shape)}"
                    )

    def finish(self) -> None:
        """Put back what torch could not load."""
        groups = self.optimizer.param_groups
        for group, curvature, rule in zip(groups, self.curvatures, self.rules, strict=True):
            if group["curvature"] not in BY_NAME:
                group["curvature"] = curvature
            if plain(rule) == group["alignment"]:
                group["alignment"] = rule  # with its reward and its bandit
        self.optimizer._aligner.load_state_dict(self.saved.get("game", {}), self.optimizer._now.rules)
        order = [i for g in self.saved["param_groups"] for i in g["params"]]
        params = [p for g in groups for p in g["params"]]
        clocks: dict[tuple[float, torch.device], Tensor] = {}
        for i, p in zip(order, params, strict=True):
            state = self.optimizer.state[p] if i in self.saved["state"] else {}
            for key, value in self.saved["state"].get(i, {}).items():
                if isinstance(value, Tensor):  # float32 averages of bfloat16 weights stay float32
                    state[key] = value.to(p.device, copy=True)
                if key == "step":  # parameters that started together share one clock
                    clock = torch.as_tensor(state[key], dtype=torch.float32, device=p.device)
                    state[key] = clocks.setdefault((float(value), p.device), clock)

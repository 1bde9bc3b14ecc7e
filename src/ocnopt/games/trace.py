"""The data flow of a model from one run on given inputs, without an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ocnopt.environment import Environment
from ocnopt.games.flow import Flow, innermost
from ocnopt.games.recorder import Recorder
from ocnopt.players import find_uses
from ocnopt.trees import tensors


def record(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Flow:
    """Run the model once; parameters, buffers and random numbers stay as they are."""
    modules = {use.module_name: use.called for uses in find_uses(model).values() for use in uses}
    device = next((p.device.type for p in model.parameters()), "cpu")
    recorder = Recorder(model, tensors((args, dict(kwargs))), device)

    def enter(name: str) -> Any:
        return lambda _, args, kwargs: recorder.enter(name, args, kwargs)

    def leave(name: str) -> Any:
        return lambda _, args, output: recorder.leave(name, output)

    handles = []
    for name in innermost(modules):
        handles.append(modules[name].register_forward_pre_hook(enter(name), with_kwargs=True))
        handles.append(modules[name].register_forward_hook(leave(name)))
    try:
        with Environment.capture(model).repeated(), torch.enable_grad():
            with recorder:
                output = model(*args, **kwargs)
            return recorder.finish(output, ())
    finally:
        for handle in handles:
            handle.remove()

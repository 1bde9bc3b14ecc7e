"""What the training loops of the benchmarks share: optimizers by name, schedule, clock, loss curve."""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

TORCH_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def ocnopt_learning_rates() -> tuple[float, ...]:
    """OCNOpt's default learning rate, and that divided and multiplied by three."""
    from ocnopt import OCNOpt

    lr = inspect.signature(OCNOpt).parameters["lr"].default
    return float(f"{lr / 3:.3g}"), lr, float(f"{lr * 3:.3g}")


def ocnopt_defaults() -> dict[str, Any]:
    """OCNOpt's other defaults, spelt out: a record says what ran, and a changed default is a run not yet done."""
    from ocnopt import OCNOpt

    parameters = inspect.signature(OCNOpt).parameters
    return {name: parameters[name].default for name in parameters if name not in ("params", "lr", "model")}


def needs_model(options: Mapping[str, Any]) -> bool:
    """Whether OCNOpt with these options needs the model; otherwise it works from the gradients alone."""
    return (
        options.get("feedback") == "nonlinear" or options.get("rank", 1) != 1 or options.get("curvature") == "kronecker"
    )


def build_optimizer(family: str, model: nn.Module, lr: float, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """An optimizer by its family; `model=True` hands OCNOpt the model even where it could do without."""
    if family in TORCH_OPTIMIZERS:
        return TORCH_OPTIMIZERS[family](model.parameters(), lr=lr, **options)
    if family != "ocnopt":
        raise ValueError(f"optimizer must be ocnopt or one of {', '.join(TORCH_OPTIMIZERS)}, got {family!r}")
    from ocnopt import OCNOpt

    options = dict(options)
    attached = options.pop("model", needs_model(options))
    return OCNOpt(model.parameters(), lr=lr, model=model if attached else None, **options)


def lr_factor(step: int, steps: int, warmup: int, cosine: bool) -> float:
    """Linear warm-up to 1, then constant, or a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    if not cosine:
        return 1.0
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


class StepClock:
    """Times every step of a loop; on a GPU by events, which do not make the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []
        self.tick()

    def tick(self) -> None:
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self._marks.append(mark)
        else:
            self._marks.append(time.perf_counter())

    def median_ms(self) -> float:
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._cuda:
            torch.cuda.synchronize()
            return statistics.median(start.elapsed_time(end) for start, end in pairs)
        return statistics.median(1e3 * (end - start) for start, end in pairs)


def curve(losses: list[Tensor], points: int = 20) -> list[float]:
    """The training loss as about `points` means of equal stretches; only here do losses leave the device."""
    values = torch.stack(losses).float()
    return [chunk.mean().item() for chunk in values.cpu().chunk(points)]


def environment(device: torch.device) -> dict[str, Any]:
    """Where a result was measured."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"torch": torch.__version__, "device": name, "threads": torch.get_num_threads()}


def peak_memory_mb(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else math.nan

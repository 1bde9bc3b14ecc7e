"""Every learning-rate scheduler of torch moves the rates of all groups, and the steps follow."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.toys import SOME_GAMES, assert_identical, batches, differ, mlp, name_of, train, values
from torch.optim import lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

from ocnopt import OCNOpt

MAKE: dict[str, Callable[[OCNOpt], LRScheduler]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.5**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=1),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [1]
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=1), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=6),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=3),
}
BASES = {"LRScheduler", "_LRScheduler"}


def test_none_is_missing() -> None:
    found = {
        name
        for place in (lr_scheduler, swa_utils)
        for name, kind in inspect.getmembers(place, inspect.isclass)
        if issubclass(kind, LRScheduler)
    }
    assert found - BASES == set(MAKE)


def step(scheduler: LRScheduler) -> None:
    scheduler.step(1.0) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()


def rates(opt: OCNOpt) -> list[float]:
    return [float(group["lr"]) for group in opt.param_groups]


@pytest.mark.parametrize("kind", ["float", "tensor"])
@pytest.mark.parametrize("name", MAKE)
def test_moves_rates_and_steps(name: str, kind: str) -> None:
    model = mlp()
    lr: Any = 0.05 if kind == "float" else torch.tensor(0.05)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1:].parameters()), "lr": copy.copy(lr)}]
    opt = OCNOpt(groups, lr, model=model, rank=2)
    scheduler = MAKE[name](opt)
    start, seen = rates(opt), []
    for batch in batches(4):
        before = values(model)
        train(model, opt, [batch])
        assert differ(values(model), before)
        step(scheduler)
        seen.append(rates(opt))
    assert any(now != start for now in seen)
    assert all(first == pytest.approx(second) for first, second in seen), "both groups"


@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_a_scheduled_step_is_that_of_the_rate(game: dict[str, Any]) -> None:
    """The rate is part of the problem that is solved, and read at each step."""
    model, twin = mlp(), mlp()
    opt, other = (OCNOpt(m.parameters(), 0.4, model=m, **game) for m in (model, twin))
    scheduler = lr_scheduler.StepLR(opt, 1, gamma=0.25)
    for t, batch in enumerate(batches(3)):
        other.param_groups[0]["lr"] = 0.4 * 0.25**t
        train(model, opt, [batch])
        train(twin, other, [batch])
        scheduler.step()
    assert_identical(values(model), values(twin))


def test_one_cycle_moves_momentum_too_where_it_is_asked_to() -> None:
    """``cycle_momentum`` reads ``momentum`` of the groups."""
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.05)
    scheduler = lr_scheduler.OneCycleLR(opt, 0.1, total_steps=4, cycle_momentum=True)
    seen = []
    for batch in batches(3):
        seen.append(opt.param_groups[0]["momentum"])
        train(model, opt, [batch])
        scheduler.step()
    assert len(set(seen)) > 1

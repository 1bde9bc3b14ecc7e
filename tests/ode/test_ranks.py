"""The final time where several optimizers watch the model, and where several processes train it."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from tests.dist import two
from tests.ode.fields import batch
from tests.ode.test_horizon import C, loss_of, model_of
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ocnopt import OCNOpt
from ocnopt.ode import Horizon


def moved(make: Any, update_every: int = 1, steps: int = 1) -> list[float]:
    model = model_of(Horizon(C, lr=0.05, update_every=update_every))
    made, seen = make(model), []
    for i in range(steps):
        model.zero_grad()
        loss_of(model, batch(seed=i)).backward()
        for opt in made:
            opt.step()
        seen.append(model[0].t[1])
    return seen


def alone(model: nn.Sequential) -> list[OCNOpt]:
    return [OCNOpt(model[0].parameters(), lr=0.05, model=model), torch.optim.SGD(model[1].parameters(), lr=0.0)]


def both(model: nn.Sequential) -> list[OCNOpt]:
    return [
        OCNOpt(model[0].parameters(), lr=0.05, model=model, feedback="off"),
        OCNOpt(model[1].parameters(), lr=1e-300, model=model, feedback="off"),
    ]


@pytest.mark.parametrize("order", [both, lambda model: both(model)[::-1]])
@pytest.mark.parametrize("update_every", [1, 3])
def test_of_two_optimizers_the_one_that_holds_the_field_moves_it(order: Any, update_every: int) -> None:
    found, wanted = (moved(make, update_every, 6) for make in (order, alone))
    assert found == pytest.approx(wanted, rel=1e-9)
    assert len(set(found)) == 6 // update_every + (update_every > 1)


def test_a_new_optimizer_takes_over_and_a_forgotten_one_does_not_count() -> None:
    def second(model: nn.Sequential) -> list[OCNOpt]:
        OCNOpt(model.parameters(), lr=0.5, model=model)
        gc.collect()
        return alone(model)

    def kept(model: nn.Sequential) -> list[OCNOpt]:
        first = OCNOpt(model.parameters(), lr=0.5, model=model)
        return [copy.copy(first), *alone(model)][1:]

    wanted = moved(alone, steps=3)
    assert moved(second, steps=3) == wanted
    assert moved(kept, steps=3) == wanted


def test_parameters_that_come_later_count() -> None:
    def later(model: nn.Sequential) -> list[Any]:
        one, two = (OCNOpt(model[1].parameters(), lr=1e-300, model=model, feedback="off") for _ in range(2))
        one.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
        return [one, two]

    assert moved(later, steps=3) == pytest.approx(moved(alone, steps=3), rel=1e-9)


# --- run in two processes ---


def trained(model: nn.Sequential, opt: OCNOpt, forward: nn.Module, half: int | None, steps: int = 4) -> list[float]:
    seen = []
    for i in range(steps):
        x = batch(8, seed=i)
        opt.zero_grad()
        loss_of(forward, x if half is None else x.chunk(2)[half]).backward()
        opt.step()
        seen.append(model[0].t[1])
    return seen


def check_the_whole_batch(rank: int, **options: Any) -> None:
    horizon = Horizon(C, lr=0.05, update_every=2)
    model, single = model_of(horizon), model_of(horizon)
    forward = DistributedDataParallel(model)
    opt = OCNOpt(model.parameters(), lr=1e-3, model=forward, feedback="off", **options)
    alone = OCNOpt(single.parameters(), lr=1e-3, model=single, feedback="off", process_group=False, **options)
    found, wanted = trained(model, opt, forward, rank), trained(single, alone, single, None)
    assert len(set(found)) == 3
    assert found == pytest.approx(wanted, rel=1e-6)
    two.assert_same_everywhere([torch.tensor(found, dtype=torch.float64)])


def check_kronecker(rank: int) -> None:
    check_the_whole_batch(rank, curvature="kronecker", refresh_every=2)


def check_other_optimizers(rank: int) -> None:
    model = model_of(Horizon(C, lr=0.05))
    opt, forward = torch.optim.SGD(model.parameters(), lr=1e-3), DistributedDataParallel(model)
    model[0].horizon.follow(opt, [*model[0].field.parameters()])
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="learn_horizon reads more than gradients, and there are 2 processes"):
        trained(model, opt, forward, rank)
    two.assert_close(model.parameters(), before, 0.0, 0.0)
    model[0].horizon.follow(opt, [*model[0].field.parameters()], distributed.group.WORLD)
    two.assert_same_everywhere([torch.tensor(trained(model, opt, forward, rank), dtype=torch.float64)])
    model[0].horizon.follow(opt, [*model[0].field.parameters()], False)
    trained(model, opt, forward, rank, steps=1)


def check_a_process_that_starts_elsewhere_or_leaves_the_block_out(rank: int) -> None:
    model = model_of(Horizon(C, lr=0.05))
    forward = DistributedDataParallel(model, find_unused_parameters=True)
    opt = OCNOpt(model.parameters(), lr=1e-3, model=forward, feedback="off")
    if rank == 1:  # as if only the first had loaded a checkpoint
        model[0].horizon.T = 1.3
    two.assert_same_everywhere([torch.tensor(trained(model, opt, forward, rank), dtype=torch.float64)])
    before = model[0].t[1]
    opt.zero_grad()
    out = forward(batch(4))
    (out.square().sum() * (rank == 0)).backward()
    if rank == 1:
        model[0].horizon._psi = []
    opt.step()
    assert model[0].t[1] != before
    two.assert_same_everywhere([torch.tensor(model[0].t[1:], dtype=torch.float64)])


def test_in_two_processes() -> None:
    two.run(
        [
            check_the_whole_batch,
            check_kronecker,
            check_other_optimizers,
            check_a_process_that_starts_elsewhere_or_leaves_the_block_out,
        ]
    )

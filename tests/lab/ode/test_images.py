"""The convolutional ODE network: its parts, its curvature, its final time."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt
from ocnopt.lab.models import build
from ocnopt.ode import NeuralODE

SHAPE = (1, 12, 12)


def block_of(net: nn.Module) -> NeuralODE:
    (block,) = (m for m in net.modules() if isinstance(m, NeuralODE))
    return block


def test_it_has_the_sizes_of_chen_et_al() -> None:
    net = build("conv_ode", (1, 28, 28), 10)
    assert sum(p.numel() for p in net.parameters()) == 208266  # theirs on MNIST
    block = block_of(net)
    assert (block.solver.method, block.solver.rtol, block.solver.atol) == ("dopri5", 1e-3, 1e-3)
    seen: list[tuple[int, ...]] = []
    block.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    net(torch.zeros(2, 1, 28, 28))
    assert seen == [(2, 64, 6, 6)]


def test_small_images_are_halved_once() -> None:
    torch.manual_seed(0)
    net = build("conv_ode", (1, 8, 8), 3, channels=6, dataset="DIGITS")
    out = net(torch.randn(2, 1, 8, 8))
    assert not torch.isclose(out[0], out[1], rtol=1e-2).any()


def test_its_layers_have_kronecker_curvature_and_its_horizon_moves(recwarn: pytest.WarningsRecorder) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, *SHAPE), torch.arange(8) % 3
    moved = {}
    for method in ("feedback", "first_order"):
        net = build("conv_ode", SHAPE, 3, channels=8, learn_time=method, time_penalty=1.0, time_lr=0.2, time_every=2)
        optimizer = OCNOpt(net.parameters(), 1e-2, model=net, curvature="kronecker", refresh_every=2)
        times = []
        for _ in range(4):
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()
            times.append(block_of(net).t[1])
        assert block_of(net).nfe.curvature > 0
        assert times[0] == 1.0 > times[1] == times[2] > times[3]  # every second step
        moved[method] = times
    assert moved["feedback"] != moved["first_order"]
    assert [str(w.message) for w in recwarn] == []


def test_bad_options_are_named() -> None:
    for options, message in (
        ({"halvings": -1}, "halvings must not be negative; got -1"),
        ({"channels": 0}, "channels must be at least 1; got 0"),
        ({"solver": "magic"}, "solver must be one of .*, got 'magic'"),
        ({"learn_time": "feedback", "time_lr": 0.0}, "lr must be a number > 0, got 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            build("conv_ode", SHAPE, 3, **options)
    with pytest.raises(ValueError, match="height and width of at least 6"):
        build("conv_ode", (1, 5, 5), 3, halvings=1)
    with pytest.raises(ValueError, match="height and width of at least 10"):
        build("conv_ode", (1, 8, 8), 3)


def test_a_solver_with_a_fixed_grid_takes_the_steps_it_is_told() -> None:
    x = torch.randn(2, *SHAPE)
    for steps in (4, 8):
        net = build("conv_ode", SHAPE, 3, channels=4, solver="rk4", steps=steps, time=0.5)
        net(x)
        assert block_of(net).nfe.forward == 4 * steps
    torch.manual_seed(0)
    fine, adams = (
        build("conv_ode", SHAPE, 3, channels=4, solver=solver, tolerance=1e-4, steps=50)
        for solver in ("dopri5", "implicit_adams")
    )
    torch.testing.assert_close(fine(x), adams(x), rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="steps must be at least 1; got 0"):
        build("conv_ode", SHAPE, 3, solver="rk4", steps=0)
    with pytest.raises(ValueError, match="time must be greater than 0; got 0"):
        build("conv_ode", SHAPE, 3, time=0.0)

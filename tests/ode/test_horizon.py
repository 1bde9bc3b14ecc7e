"""The final time: its derivative, its closed form, its checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.ode.fields import Net, Pair, batch
from torch import Tensor, nn

from ocnopt import OCNOpt
from ocnopt.ode import Horizon, NeuralODE

TIGHT = {"rtol": 1e-9, "atol": 1e-9}
C = 0.3
NOBODY = r"learn_horizon: no optimizer moves T, which stays 1\.2: pass model=.* or call horizon\.follow"


def model_of(horizon: Horizon | None, T: float = 1.2, **options: Any) -> nn.Sequential:
    torch.manual_seed(2)
    block = NeuralODE(Net(), t=(0.0, T), learn_horizon=horizon, **{**TIGHT, **options})
    return nn.Sequential(block, nn.Linear(3, 2)).double()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1.5).square().mean()


def slope(model: nn.Sequential, x: Tensor, T: float) -> float:
    """dL/dT by central differences."""
    found = []
    for t in (T + 1e-4, T - 1e-4):
        with torch.no_grad():
            found.append((model[1](model[0](x, t=(0.0, t))) - 1.5).square().mean())
    return float(found[0] - found[1]) / 2e-4


@pytest.mark.parametrize("gradient", ["adjoint", "discretize"])
def test_first_order_is_the_gradient_of_the_penalised_loss(gradient: str) -> None:
    model, x = model_of(Horizon(C, lr=0.01, method="first_order"), gradient=gradient), batch()
    opt = OCNOpt(model.parameters(), model=model)
    wanted = 1.2 - 0.01 * (C * 1.2 + slope(model, x, 1.2))
    loss_of(model, x).backward()
    opt.step()
    assert model[0].t[1] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("make", [OCNOpt, torch.optim.SGD, torch.optim.Adam])
def test_feedback_is_the_closed_form_with_the_step_just_taken(make: Any) -> None:
    model, x, gamma = model_of(Horizon(C, lr=0.5)), batch(), 0.1
    field = [*model[0].field.parameters()]
    opt = make(model.parameters(), lr=0.05, weight_decay=gamma, **({"model": model} if make is OCNOpt else {}))
    if make is not OCNOpt:
        model[0].horizon.follow(opt, field)
    psi = slope(model, x, 1.2)
    before = [p.detach().clone() for p in field]
    loss_of(model, x).backward()
    opt.step()
    p_dtheta = sum(float((p.grad * (p.detach() - b)).sum()) for p, b in zip(field, before, strict=True))
    cost = gamma / 2 * sum(float(b.square().sum()) for b in before)
    wanted = 1.2 - 0.5 * (cost + C * 1.2 + psi + psi * p_dtheta) / (C + psi**2)
    assert abs(p_dtheta) > 1e-4
    assert model[0].t[1] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("make", [OCNOpt, torch.optim.AdamW])
def test_decoupled_weight_decay_is_no_running_cost(make: Any) -> None:
    model, x = model_of(Horizon(C, lr=0.5)), batch()
    field = [*model[0].field.parameters()]
    decoupled = {"decoupled_weight_decay": True} if make is OCNOpt else {}
    opt = make(model.parameters(), lr=0.05, weight_decay=0.5, **decoupled)
    model[0].horizon.follow(opt, field)
    psi, before = slope(model, x, 1.2), [p.detach().clone() for p in field]
    loss_of(model, x).backward()
    opt.step()
    p_dtheta = sum(float((p.grad * (p.detach() - b)).sum()) for p, b in zip(field, before, strict=True))
    assert model[0].t[1] == pytest.approx(1.2 - 0.5 * (C * 1.2 + psi + psi * p_dtheta) / (C + psi**2), rel=1e-5)


@pytest.mark.parametrize("settings", [Horizon(1e-9, lr=1.0), Horizon(0.0, lr=1e6, method="first_order")])
def test_it_never_more_than_doubles_at_a_time(settings: Horizon) -> None:
    model = model_of(settings)
    opt, seen = torch.optim.SGD(model.parameters(), lr=0.0), []
    model[0].horizon.follow(opt, [*model[0].field.parameters()])
    for _ in range(2):
        opt.zero_grad()
        # what is wanted is ahead on the way: the loss falls with T, hardly, and the step would be immense
        out = model[0](batch())
        speed = model[0].field(torch.tensor(model[0].t[1], dtype=torch.float64), out).detach()
        (-1e-3 * out * speed).sum().backward()
        opt.step()
        seen.append(model[0].t[1])
    assert seen == [2.4, 4.8]


def test_without_a_price_first_order_follows_the_loss_alone() -> None:
    model, x = model_of(Horizon(0.0, lr=0.01, method="first_order")), batch()
    opt = OCNOpt(model.parameters(), model=model)
    wanted = 1.2 - 0.01 * slope(model, x, 1.2)
    loss_of(model, x).backward()
    opt.step()
    assert model[0].t[1] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("make", [OCNOpt, torch.optim.SGD])
@pytest.mark.parametrize("method", ["feedback", "first_order"])
def test_climbing_is_descending_on_the_loss_with_the_other_sign(make: Any, method: str) -> None:
    found = []
    for maximize in (True, False):
        model = model_of(Horizon(C, lr=0.05, method=method))
        opt = make(model.parameters(), lr=0.05, maximize=maximize, weight_decay=0.1)
        model[0].horizon.follow(opt, [*model[0].field.parameters()])
        (loss_of(model, batch()) * (-1) ** (not maximize)).backward()
        opt.step()
        found.append(model[0].t[1])
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert found[0] != 1.2


@pytest.mark.parametrize("make", [OCNOpt, torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("unscaled_by_hand", [True, False])
def test_a_scaled_loss_moves_it_as_the_loss_does(make: Any, unscaled_by_hand: bool) -> None:
    found = []
    for scaled in (True, False):
        model = model_of(Horizon(C, lr=0.05))
        opt = make(model.parameters(), lr=0.05)
        model[0].horizon.follow(opt, [*model[0].field.parameters()])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=scaled)
        for i in range(2):
            opt.zero_grad()
            for micro in range(2):
                scaler.scale(loss_of(model, batch(seed=2 * i + micro)).float()).backward()
            if unscaled_by_hand:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            scaler.step(opt)
            scaler.update()
        found.append(model[0].t[1])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert abs(found[0] - 1.2) > 1e-3


def discarded(model: nn.Sequential, opt: Any, set_to_none: bool) -> None:
    loss_of(model, batch(seed=7)).backward()
    opt.zero_grad(set_to_none)


def skipped(model: nn.Sequential, opt: Any, set_to_none: bool) -> None:
    (loss_of(model, batch(seed=7)) * float("inf")).backward()
    opt.zero_grad(set_to_none)


def saliency(model: nn.Sequential, opt: Any, set_to_none: bool) -> None:
    x = batch(seed=7).requires_grad_()
    loss_of(model, batch()).backward()  # a first half of what is to come
    torch.autograd.grad(loss_of(model, x), x)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("make", [OCNOpt, torch.optim.SGD])
@pytest.mark.parametrize("meanwhile", [discarded, skipped, saliency])
def test_only_the_gradient_at_hand_counts(meanwhile: Any, make: Any, set_to_none: bool) -> None:
    found = []
    for disturbed in (True, False):
        model = model_of(Horizon(C, lr=0.05))
        opt = make(model.parameters(), lr=0.05)
        model[0].horizon.follow(opt, [*model[0].field.parameters()])
        if disturbed:
            meanwhile(model, opt, set_to_none)
        elif meanwhile is saliency:
            loss_of(model, batch()).backward()
        loss_of(model, batch()).backward()
        opt.step()
        found.append(model[0].t[1])
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert found[0] != 1.2


def test_a_block_that_is_called_twice_in_a_pass_adds_both() -> None:
    model = model_of(Horizon(C, lr=0.01, method="first_order"))
    opt, x = torch.optim.SGD(model.parameters(), lr=0.05), batch()
    model[0].horizon.follow(opt, [*model[0].field.parameters()])
    wanted = 1.2 - 0.01 * (C * 1.2 + 3 * slope(model, x, 1.2))
    (loss_of(model, x) + 2 * loss_of(model, x)).backward()
    opt.step()
    assert model[0].t[1] == pytest.approx(wanted, rel=1e-6)


def test_nothing_is_kept_for_nobody() -> None:
    model = model_of(Horizon(C))
    model[0].nfe.reset()
    with pytest.warns(UserWarning, match=NOBODY):
        loss_of(model, batch()).backward()
    alone = model[0].nfe.forward
    other = model_of(None)
    loss_of(other, batch()).backward()
    assert alone == other[0].nfe.forward  # the speed at the end is one evaluation more


def test_tuple_states_and_all_times_give_the_same_slope() -> None:
    found = []
    for all_times in (False, True):
        block = NeuralODE(Pair(), t=(0.0, 0.9), learn_horizon=Horizon(C, 0.01, method="first_order"), **TIGHT)
        opt = OCNOpt(block.parameters(), model=block)
        out, clock = block((batch(4, 2), torch.zeros(4, dtype=torch.float64)), all_times=all_times)
        ((out[-1] if all_times else out) ** 3).sum().backward(retain_graph=True, inputs=[block.field.omega])
        (clock[-1] if all_times else clock).sum().backward(inputs=[block.field.omega])
        opt.step()
        found.append(block.t[1])
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    omega, x = 2.0, batch(4, 2)
    angle = torch.tensor(omega * 0.9, dtype=torch.float64)
    turned = torch.stack(
        [x[:, 0] * angle.cos() - x[:, 1] * angle.sin(), x[:, 0] * angle.sin() + x[:, 1] * angle.cos()], 1
    )
    speed = omega * torch.stack([-turned[:, 1], turned[:, 0]], 1)
    psi = float((3 * turned**2 * speed).sum()) + 4.0
    assert found[0] == pytest.approx(0.9 - 0.01 * (C * 0.9 + psi), rel=1e-6)


def test_it_moves_every_few_steps_and_not_below_its_minimum() -> None:
    model = model_of(Horizon(50.0, lr=1.0, update_every=3, minimum=0.4))
    opt, seen = OCNOpt(model.parameters(), model=model), []
    for i in range(7):
        opt.zero_grad()
        loss_of(model, batch(seed=i)).backward()
        opt.step()
        seen.append(model[0].t[1])
    assert seen[0] == seen[1] == 1.2
    assert seen[2:] == [0.4] * 5


def test_evaluation_other_intervals_and_bad_batches_leave_it_alone() -> None:
    model = model_of(Horizon(C))
    opt = OCNOpt(model.parameters(), model=model)
    model.eval()
    loss_of(model, batch()).backward()
    opt.step()
    model.train()
    model[0](batch(), t=(0.0, 0.5)).sum().backward()
    opt.step()
    assert model[0].t == (0.0, 1.2)
    opt.zero_grad()
    (loss_of(model, batch()) * float("nan")).backward()
    opt.step()
    assert model[0].t == (0.0, 1.2)


def test_the_second_pass_and_the_horizon_get_along() -> None:
    model = model_of(Horizon(C))
    opt = OCNOpt(model.parameters(), model=model, feedback="nonlinear", curvature="kronecker")
    seen = []
    for i in range(3):
        opt.zero_grad()
        loss_of(model, batch(seed=i)).backward()
        opt.step()
        seen.append(model[0].t[1])
    assert len(set(seen)) == 3


def test_detach_lets_it_rest() -> None:
    model = model_of(Horizon(C))
    opt = OCNOpt(model.parameters(), model=model)
    opt.detach()
    with pytest.warns(UserWarning, match=NOBODY):
        loss_of(model, batch()).backward()
    opt.step()
    assert model[0].t[1] == 1.2


def test_a_checkpoint_continues_bit_for_bit(tmp_path: Any) -> None:
    def steps(model: nn.Module, opt: OCNOpt, first: int, last: int) -> None:
        for i in range(first, last):
            opt.zero_grad()
            loss_of(model, batch(seed=i)).backward()
            opt.step()

    horizon = Horizon(C, update_every=2)
    one, two = model_of(horizon), model_of(horizon)
    straight, fresh = (OCNOpt(m.parameters(), model=m) for m in (one, two))
    steps(one, straight, 0, 3)  # in the middle between two moves
    torch.save({"model": one.state_dict(), "opt": straight.state_dict()}, tmp_path / "c.pt")
    saved = torch.load(tmp_path / "c.pt", weights_only=True)
    two.load_state_dict(saved["model"])
    fresh.load_state_dict(saved["opt"])
    assert two[0].t == one[0].t != (0.0, 1.2)
    steps(one, straight, 3, 7)
    steps(two, fresh, 3, 7)
    assert one[0].t == two[0].t
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))


def test_a_copy_is_moved_by_nobody_and_other_blocks_save_nothing() -> None:
    model = model_of(Horizon(C))
    opt = OCNOpt(model.parameters(), model=model)
    other = copy.deepcopy(model)
    loss_of(model, batch()).backward()
    opt.step()
    assert model[0].t[1] != other[0].t[1] == 1.2
    assert "0.horizon._extra_state" in model.state_dict()
    assert not any("horizon" in name for name in model_of(None).state_dict())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"penalty": -1.0}, "penalty must be a number ≥ 0, got -1.0"),
        ({"penalty": 0.0}, "penalty must be > 0 with method='feedback'"),
        ({"lr": 0.0}, "lr must be a number > 0"),
        ({"minimum": float("nan")}, "minimum must be a number > 0"),
        ({"update_every": 0}, "update_every must be a whole number ≥ 1, got 0"),
        ({"method": "second"}, "method must be one of 'feedback', 'first_order', got 'second'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Horizon(**{"penalty": 1.0, **arguments})


def test_wrong_blocks() -> None:
    with pytest.raises(TypeError, match="learn_horizon must be a Horizon, got float"):
        NeuralODE(Net(), learn_horizon=0.1)
    for t in ((0.0, 0.5, 1.0), (1.0, 0.0)):
        with pytest.raises(ValueError, match="learn_horizon needs two times, the second of them later"):
            NeuralODE(Net(), t=t, learn_horizon=Horizon(1.0))
    with pytest.raises(ValueError, match=r"minimum must not exceed the length of the time interval, 1\.0, got 2"):
        NeuralODE(Net(), learn_horizon=Horizon(1.0, minimum=2))


@pytest.mark.parametrize("make", [torch.optim.Adam, OCNOpt])
def test_that_nobody_moves_the_horizon_is_said_once(make: Any) -> None:
    model, x = model_of(Horizon(C)), batch()
    opt = make(model.parameters())  # without the model
    with torch.no_grad():
        model(x)
    model.eval()(x)  # warnings are errors here
    model.train()[0](x, t=(0.0, 1.0))  # nor does a call with times of its own learn any
    with pytest.warns(UserWarning, match=rf"^NeuralODE\(Net\): {NOBODY}"):
        loss_of(model, x).backward()
    opt.step()
    loss_of(model, x).backward()
    assert model[0].t == (0.0, 1.2)


def test_a_horizon_that_waits_for_its_step_is_followed() -> None:
    model = model_of(Horizon(C, update_every=3))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].horizon.follow(opt, [*model[0].field.parameters()])
    loss_of(model, batch()).backward()
    opt.step()
    assert model[0].t == (0.0, 1.2)

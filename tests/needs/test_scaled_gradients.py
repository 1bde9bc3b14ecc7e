"""Mixed precision with a GradScaler, and clipping: adjoints follow what happens to ``p.grad`` after backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.toys import assert_identical, batches, mlp, name_of, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt
from ocnopt.distributed import World
from ocnopt.scaling import Scaling

GAMES: list[dict[str, Any]] = [
    {"curvature": curvature, "feedback": feedback, "rank": rank}
    for curvature in ("identity", "adaptive", "kronecker")
    for feedback, rank in (("linear", 1), ("linear", 3), ("nonlinear", 1), ("nonlinear", "full"))
]
games = pytest.mark.parametrize("game", GAMES, ids=name_of)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.body(0.5 * x)


def make(game: dict[str, Any], branching: bool = False) -> tuple[nn.Module, OCNOpt]:
    torch.manual_seed(0)
    model = (Residual() if branching else mlp()).double()
    return model, OCNOpt(model.parameters(), 0.05, model=model, damping=0.1, clamp=False, **game)


@games
@pytest.mark.parametrize("branching", [False, True], ids=["chain", "branches"])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaler_changes_nothing(game: dict[str, Any], branching: bool, unscale: bool) -> None:
    """Its factors are powers of two, so not even a bit."""
    (model, opt), (twin, its) = make(game, branching), make(game, branching)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
    for x, y in batches(4):
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        opt.step()
        its.zero_grad()
        scaler.scale(cross_entropy(twin(x), y)).backward()
        if unscale:
            scaler.unscale_(its)
        scaler.step(its)
        scaler.update()
    assert scaler.get_scale() == 2.0**14
    for a, b in zip(values(model), values(twin), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(opt.diagnostics.s, its.diagnostics.s, rtol=1e-10, atol=1e-13)


@games
def test_an_overflow_is_skipped_without_harm(game: dict[str, Any]) -> None:
    model, opt = make(game)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    data = batches(3)
    for i, (x, y) in enumerate(data):
        opt.zero_grad()
        factor = float("inf") if i == 1 else 1.0
        scaler.scale(factor * cross_entropy(model(x), y)).backward()
        before = [t.clone() for t in values(model)], {k: v.clone() for k, v in flat(opt).items()}
        scaler.step(opt)
        scaler.update()
        if i == 1:
            assert_identical(values(model), before[0])
            assert_identical(flat(opt), before[1])
    assert scaler.get_scale() == 2.0**11
    twin, its = make(game)
    for x, y in data[::2]:
        its.zero_grad()
        cross_entropy(twin(x), y).backward()
        its.step()
    for a, b in zip(values(model), values(twin), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def flat(opt: OCNOpt) -> dict[str, Tensor]:
    return {f"{i} {k}": v for i, own in enumerate(opt.state.values()) for k, v in own.items() if isinstance(v, Tensor)}


@games
def test_clipping_by_norm_is_a_smaller_loss(game: dict[str, Any]) -> None:
    (model, opt), (twin, its) = make(game), make(game)
    x, y = batches(1)[0]
    cross_entropy(model(x), y).backward()
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    opt.step()
    assert total > 0.1
    (cross_entropy(twin(x), y) * 0.1 / (total + 1e-6)).backward()
    its.step()
    for a, b in zip(values(model), values(twin), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@games
def test_a_scaler_changes_nothing_when_gradients_are_clipped_by_value(game: dict[str, Any]) -> None:
    """They are not just multiplied then; the adjoints follow the scaler all the same."""
    (model, opt), (twin, its) = make(game), make(game)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for x, y in batches(3):
        opt.zero_grad()
        cross_entropy(model(x), y).backward()
        largest = max(float(p.grad.abs().max()) for p in model.parameters())
        nn.utils.clip_grad_value_(model.parameters(), 0.8 * largest)
        opt.step()
        its.zero_grad()
        scaler.scale(cross_entropy(twin(x), y)).backward()
        scaler.unscale_(its)
        nn.utils.clip_grad_value_(twin.parameters(), 0.8 * largest)
        scaler.step(its)
        scaler.update()
    for a, b in zip(values(model), values(twin), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(opt.diagnostics.s, its.diagnostics.s, rtol=1e-10, atol=1e-13)


def test_the_step_leaves_the_gradients_alone() -> None:
    """Dividing them is the scaler's business: trainers that clip between the two count on that."""
    model, opt = make({"curvature": "adaptive", "feedback": "nonlinear", "rank": 1})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    x, y = batches(1)[0]
    scaler.scale(cross_entropy(model(x), y)).backward()
    scaler.unscale_(opt)
    before = [p.grad.clone() for p in model.parameters()]
    scaler.step(opt)
    assert_identical([p.grad for p in model.parameters()], before)
    assert not getattr(opt, "_step_supports_amp_scaling", False)


def test_half_precision_adjoints_do_not_underflow() -> None:
    """Unscaled they would be zero in float16."""
    torch.manual_seed(0)
    model = mlp().float()
    opt = OCNOpt(model.parameters(), 0.05, model=model, rank="full", curvature="identity", feedback="linear")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    x, y = batches(1)[0]
    with torch.autocast("cpu", torch.float16):
        loss = 1e-6 * cross_entropy(model(x.float()).float(), y)
    scaler.scale(loss).backward()
    scaler.step(opt)
    kernels = opt.diagnostics.kernels.K.diagonal(dim1=1, dim2=2)
    assert (kernels > 0).all()
    assert kernels.max() < 1e-8  # of the loss itself, and not of the scaled one


def _penalised(g: Tensor, size: float = 0.1) -> Tensor:
    return g + size * torch.linspace(-1, 1, g.numel(), dtype=g.dtype).view(g.shape)


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        (lambda g: g / 1024, 1 / 1024),
        (lambda g: 0.3 * g, 0.3),
        (lambda g: g.bfloat16().double() / 3, 1 / 3),
        (lambda g: g.clamp(-0.1, 0.1), 1),
        (lambda g: (g / 1024).clamp(-0.1 / 1024, 0.1 / 1024), 1 / 1024),
        (_penalised, 1),
        (lambda g: _penalised(g / 1024, 1e-4), 1 / 1024),
        (torch.randn_like, 1),
        (lambda g: 0 * g, 0),
        (lambda g: g * float("nan"), 1),
    ],
)
def test_what_was_done_to_the_gradients(change: Callable[[Tensor], Tensor], factor: float) -> None:
    model, opt = make(GAMES[-1])
    (x, y), *_ = batches(1)
    cross_entropy(model(x), y).backward()
    for p in model.parameters():
        p.grad = change(p.grad)
    opt._tape.rescale(World())
    scale = opt._tape.passes[0].scale
    assert (1.0 if scale is None else scale.item()) == pytest.approx(factor, rel=3e-3)


@pytest.mark.parametrize("game", [GAMES[1], GAMES[-1]], ids=name_of)
def test_whichever_parameters_have_gradients(game: dict[str, Any]) -> None:
    """Many small ones that are not used, and in the third step the layers that were frozen before."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.ModuleList(nn.Linear(1, 1) for _ in range(20))
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    found = []
    for scale in (1.0, 2.0**12):
        torch.manual_seed(0)
        model = Many().double()
        opt = OCNOpt(model.parameters(), 0.05, model=model, damping=0.1, **game)
        for i, (x, y) in enumerate(batches(4)):
            model.body[0].requires_grad_(i > 1)
            model.body[2].requires_grad_(i < 2)
            opt.zero_grad()
            (scale * cross_entropy(model(x), y)).backward()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= scale
            opt.step()
        found.append(values(model))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


# --- when gradients are looked at ---


def _left(backward: Callable[[nn.Module], None], hook: Callable[[Tensor], None] | None = None) -> Any:
    """An optimizer that has seen a backward pass, and what there is of the gradients."""
    model, opt = make({"curvature": "identity", "feedback": "nonlinear"})
    for p in model.parameters() if hook is not None else ():
        p.register_post_accumulate_grad_hook(hook)
    backward(model)
    return opt, _entries(model), model


def _entries(model: nn.Module) -> list[Tensor]:
    return [p.grad.flatten()[:256] for p in model.parameters()]


def _kept(scaling: Any, model: nn.Module) -> list[Tensor]:
    kept = scaling.kept
    return [kept[p] for p in model.parameters()]


def _once(model: nn.Module) -> None:
    (x, y), _ = batches(2)
    cross_entropy(model(x), y).backward()


def test_gradients_are_looked_at_when_the_backward_pass_is_over() -> None:
    opt, grads, model = _left(_once)
    scaling = opt._tape.scaling
    assert not scaling._waiting
    assert_identical(_kept(scaling, model), grads)
    assert all(taken.is_left for taken in scaling._taken)
    held = [grad for taken in scaling._taken for grad, _ in taken.left]
    assert {id(grad) for grad in held} == {id(p.grad) for p in model.parameters()}


def test_who_writes_to_them_in_the_backward_pass_comes_later() -> None:
    """A hook of somebody else, after ours: what it does is part of the factor."""

    def halve(p: Tensor) -> None:
        p.grad.data.mul_(0.5)

    opt, grads, model = _left(_once, halve)
    scaling = opt._tape.scaling
    assert_identical(_kept(scaling, model), [2 * grad for grad in grads])
    torch.testing.assert_close(scaling.factor(World()), torch.tensor(0.5, dtype=torch.float64))


def test_a_backward_pass_that_is_interrupted() -> None:
    def interrupted(model: nn.Module) -> None:
        first = next(model.parameters())
        handle = first.register_post_accumulate_grad_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            _once(model)
        handle.remove()
        for p in model.parameters():
            p.grad = torch.ones_like(p)

    opt, _, model = _left(interrupted)
    scaling = opt._tape.scaling
    scaling.clear()
    assert not scaling._waiting
    model.zero_grad()
    _once(model)
    assert_identical(_kept(scaling, model), _entries(model))


def test_several_processes_send_gradients_before_the_backward_pass_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ocnopt.scaling._several_processes", lambda: True)
    model, opt = make({"curvature": "identity", "feedback": "nonlinear"})
    first = next(model.parameters())
    (x, y), _ = batches(2)
    loss, seen = cross_entropy(model(x), y), []
    torch.autograd.graph.get_gradient_edge(first).node.register_hook(
        lambda *_: seen.append(first in opt._tape.scaling.kept)
    )
    loss.backward()
    assert seen == [True]


def test_a_second_backward_pass_takes_the_place_of_what_it_adds_to() -> None:
    """What was done meanwhile to a gradient that it leaves alone is part of the factor; ``None`` is not looked at."""
    heads = [nn.Parameter(torch.tensor([3.0, 5.0]) * (i + 1)) for i in range(3)]
    trunk = nn.Parameter(torch.tensor([1.0, 2.0, 4.0]))
    scaling = Scaling(nn.ParameterList([trunk, *heads]), lambda: True)
    for i in (0, 1):
        (trunk.sum() * (heads[i] * heads[i]).sum() + heads[2].sum()).backward()
        heads[0].grad.data.mul_(0.5)
    then, half = scaling.kept, heads[0].grad
    assert_identical([then[p] for p in (trunk, *heads[1:])], [p.grad for p in (trunk, *heads[1:])])
    assert_identical([then[heads[0]]], [4 * half])
    heads[1].grad = None
    before, now = (torch.cat(column) for column in zip(*scaling.pairs, strict=True))
    assert len(before) == sum(len(p) for p in (trunk, heads[0], heads[2]))
    torch.testing.assert_close((before - now).sum(), (3 * half).sum())

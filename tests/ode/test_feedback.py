"""Feedback across a block is that of the same network with the solve written out as a chain of Euler steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ode.fields import TIGHT, Net, batch, loss_of, network, optimizer
from torch import Tensor, nn

from ocnopt import OCNOpt
from ocnopt.ode import NeuralODE

B, STEPS = 5, 20
#: large steps and no bound on w, for the feedback to matter
SETTINGS = {"lr": 0.1, "damping": 0.1, "clamp": False}


class Single(nn.Module):
    """A field of one layer. (In a chain, of several the second acts after the first; in a block they act at once.)"""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(4, 3).double()

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.one(torch.cat([x, t.expand(len(x), 1)], 1)))


class Chain(nn.Module):
    """x_{k+1} = x_k + h F(k h, x_k)."""

    def __init__(self, field: nn.Module) -> None:
        super().__init__()
        self.field = field

    def forward(self, x: Tensor) -> Tensor:
        for k in range(STEPS):
            x = x + self.field(x.new_tensor(k / STEPS), x) / STEPS
        return x


def solved(field: nn.Module) -> NeuralODE:
    return NeuralODE(field, solver="euler", options={"step_size": 1 / STEPS}, gradient="discretize", nodes=6)


def stepped(block: NeuralODE | Chain, frozen: bool = False, **options: Any) -> tuple[Tensor, OCNOpt]:
    """One step of the whole network, and who made it."""
    model = network(block)
    block.field.requires_grad_(not frozen)
    before = [p.detach().clone() for p in model.parameters()]
    opt = optimizer(model, **{**SETTINGS, **options})
    loss_of(model, batch(B)).backward()
    opt.step()
    pairs = zip(model.parameters(), before, strict=True)
    return torch.cat([(p.detach() - old).flatten() for p, old in pairs]), opt


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("curvature", ["adaptive", "kronecker"])
@pytest.mark.parametrize("rank", [1, 2, "full"])
@pytest.mark.parametrize("feedback", ["linear", "nonlinear"])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_block_is_the_chain_of_its_steps(feedback: str, rank: int | str, curvature: str, frozen: bool) -> None:
    options: dict[str, Any] = {"curvature": curvature, "rank": rank, "frozen": frozen}
    step, opt = stepped(solved(Single()), feedback=feedback, **options)
    wanted, chain = stepped(Chain(Single()), feedback=feedback, **options)
    # the same but for the factors, and the gradients of groups of samples, of the field: a quadrature along the solve
    # here, the sum over the steps there
    exact = frozen or (curvature, rank) == ("adaptive", 1)
    error = 1e-12 if exact else 4e-3
    assert distance(step, wanted) < error
    assert [layer.stage for layer in opt.diagnostics.layers] == [layer.stage for layer in chain.diagnostics.layers]
    for mine, its in zip(opt.diagnostics.layers, chain.diagnostics.layers, strict=True):
        assert mine.s == pytest.approx(its.s, rel=error)
    assert opt.diagnostics.predicted_change == pytest.approx(chain.diagnostics.predicted_change, rel=error)
    without, _ = stepped(solved(Single()), feedback="off", **options)
    assert distance(without, wanted) > 0.03


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("feedback", ["linear", "nonlinear"])
def test_feedback_does_not_depend_on_how_the_gradient_is_made(feedback: str, rank: int) -> None:
    a, b = (
        stepped(NeuralODE(Net(), gradient=gradient, **TIGHT), feedback=feedback, rank=rank)[0]
        for gradient in ("adjoint", "discretize")
    )
    assert distance(a, b) < 1e-6
    without, _ = stepped(NeuralODE(Net(), **TIGHT), rank=rank)
    assert distance(without, a) > 0.03


@pytest.mark.parametrize(("feedback", "lr", "error"), [("nonlinear", 0.05, 1e-6), ("linear", 1e-5, 1e-3)])
def test_a_layer_after_the_block_sees_what_the_whole_block_has_changed(feedback: str, lr: float, error: float) -> None:
    """The nonlinear rollout measures it, the linear one predicts it to first order."""
    model = network(NeuralODE(Net(), **TIGHT))
    opt = optimizer(model, feedback=feedback, lr=lr, damping=0.1, momentum=0.0, clamp=False)
    x, kept = batch(B), []
    handle = model[3].register_forward_pre_hook(lambda m, args: kept.append(args[0]))
    loss = loss_of(model, x)
    (d,) = torch.autograd.grad(loss, kept[0], retain_graph=True)
    loss.backward()
    opt.step()
    handle.remove()
    changed = (model[:3](x) - kept[0]).detach()
    assert opt.diagnostics.s is not None
    assert opt.diagnostics.s[-1].item() == pytest.approx(float((d * changed).sum()), rel=error)

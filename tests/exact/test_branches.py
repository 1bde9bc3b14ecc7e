"""Networks that are no simple chain: a module used twice, residual connections; and how the two are told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.exact.columns import Policy, group_gradients, sizes
from tests.exact.compare import PLAIN, assert_close, assert_same_step, check, engine_step, optimizer, stagewise
from tests.exact.dense import Dense
from tests.exact.nets import CLASSES, RANKS, B, Net, Residual, loss, make, rank_of, real, seeded
from torch import Tensor, nn

from ocnopt import OCNOpt

BETA, LR, DECAY, MU = PLAIN["gauss_newton"], 0.8, 0.01, 0.4
OPTIONS: dict[str, Any] = {"curvature": "identity", "lr": LR, "weight_decay": DECAY, "momentum": MU, "ema": False}


class ByHand:
    """One step of a network whose players act in a given order, from the definitions in coordinates of the groups.

    ``forward`` runs the network and returns its output and, by name, the tensors in it that are wanted. ``stages``
    are the names of the parameters of each stage; identity metric, first step of a heavy
    ball.
    """

    Forward = Callable[[Any, Tensor], tuple[Tensor, dict[str, Tensor]]]

    def __init__(self, net: Net, forward: Forward, stages: list[str], rank: int) -> None:
        self.model, self.forward, self.rank = net.model[0], forward, rank
        self.X, targets = net.batches[0]
        named = dict(self.model.named_parameters())
        self.stages = [[p for n, p in named.items() if f"{n}.".startswith(f"{name}.")] for name in stages]
        self.output, self.before = forward(self.model, self.X)
        (self.adjoint,) = torch.autograd.grad(loss(self.output, targets), self.output, retain_graph=True)
        G = [torch.cat(group_gradients(self.output, self.adjoint, params, rank)) for params in self.stages]
        theta = [torch.cat([p.detach().flatten() for p in params]) for params in self.stages]
        eyes = [(1 - MU) / LR * torch.eye(len(t), dtype=torch.float64) for t in theta]
        self.theta, self.policy = theta, Policy(G, eyes, [DECAY * t for t in theta], BETA)

    def columns(self, name: str) -> Tensor:
        """The adjoint of a tensor of the network, through all paths, one column a group."""
        return group_gradients(self.output, self.adjoint, [self.before[name]], self.rank)[0]

    def changes(self, steps: list[Tensor]) -> dict[str, Tensor]:
        """What the steps so far do to each named tensor."""
        self._set([theta + step for theta, step in zip(self.theta, steps, strict=False)])
        with torch.no_grad():
            _, after = self.forward(self.model, self.X)
        self._set(self.theta)
        return {name: (after[name] - before).detach().flatten() for name, before in self.before.items()}

    def _set(self, thetas: list[Tensor]) -> None:
        for params, theta in zip(self.stages, thetas, strict=False):
            for p, values in zip(params, theta.split([p.numel() for p in params]), strict=True):
                p.data.copy_(values.view_as(p))

    def check(self, net: Net, rank: int | str, s: Callable[[list[Tensor]], Tensor]) -> OCNOpt:
        """``s(steps)``: the change of the groups' losses that the stage after these steps answers to, accumulated."""
        expected = self.policy.nonlinear_rollout(s, fraction=1 - MU)
        opt = optimizer(net, feedback="nonlinear", rank=rank, state="accumulated", **OPTIONS)
        actual = engine_step(net.model, opt, net.batches[0])
        by_stage = {id(p): actual[n] for n, p in net.model.named_parameters()}
        for k, (params, step) in enumerate(zip(self.stages, expected, strict=True)):
            assert_close(torch.cat([by_stage[id(p)].flatten() for p in params]), step, f"δθ of stage {k}")
        return opt


# --- a module used twice, and a weight used by two modules ---


class Reuse(nn.Module):
    """The weight of ``inner`` is one player at its first use, with the gradients of both."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.into, self.inner, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)
        if tied:
            self.other = nn.Linear(5, 5)
            self.other.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return run_reuse(self, x)[0]


def run_reuse(model: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    first = model.into(x).tanh()
    second = model.inner(first).tanh()
    third = getattr(model, "other", model.inner)(second).tanh()
    return model.out(third), {"inner": first, "other": second, "out": third}


def reuse(tied: bool) -> Net:
    with seeded(4):
        return Net([Reuse(tied)], real(4))


@pytest.mark.parametrize("curvature", ["identity", "adaptive"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("tied", [False, True])
def test_linear_rollout_with_reuse_is_whole_network_gauss_newton(tied: bool, rank: int | str, curvature: str) -> None:
    net = reuse(tied)
    opt = optimizer(net, rank=rank, curvature=curvature, lr=0.2, eps=1e-2, weight_decay=DECAY, momentum=0.5)
    dense = Dense(net, opt)  # the network is one stage of the dense solver
    for batch in net.batches:
        actual, e = engine_step(net.model, opt, batch), dense.step(batch)
        assert_same_step(dense, stagewise(net, actual), e)
        a, Sigma = opt.diagnostics.policy.value(0)
        assert_close(e.D[0] @ a, e.solution.Vx[0], "V_x")
        assert_close(e.D[0] @ Sigma @ e.D[0].T, e.solution.Vxx[0], "V_xx")


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("tied", [False, True])
def test_reused_weight_acts_once_at_its_first_use(tied: bool, rank: int | str) -> None:
    net = reuse(tied)
    stages = ["into", "inner", *(["other"] if tied else []), "out"]
    hand = ByHand(net, run_reuse, stages, rank_of(rank))
    D = {name: hand.columns(name) for name in stages[1:]}  # of the input of each

    def s(steps: list[Tensor]) -> Tensor:
        layer = stages[len(steps)]
        return D[layer].T @ hand.changes(steps)[layer]

    hand.check(net, rank, s)


# --- residual connections ---


@pytest.mark.parametrize("state", ["live", "accumulated"])
@pytest.mark.parametrize("rank", RANKS)
def test_residual_of_a_linear_network_is_the_dense_solution(rank: int | str, state: str) -> None:
    """Either way s is ⟨∂L/∂x, δx⟩ of the state after the merge, as if the block were one stage."""
    with seeded(5):
        net = Net([nn.Linear(4, 5), Residual(nn.Linear(5, 5)), nn.Linear(5, CLASSES)], real(4))
    opt = optimizer(net, feedback="nonlinear", rank=rank, state=state, **OPTIONS)
    check(net, opt)
    assert not is_chain(net.model, opt, net.batches[0][0])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.inner, self.out = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return run_block(self, x)[0]


def run_block(model: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    stem = model.into(x)
    edge = stem.view_as(stem)  # the gradient of an alias is that through its own edge
    inner = model.inner(edge)
    merged = stem + inner.tanh()
    return model.out(merged), {"stem": stem, "edge": edge, "inner": inner, "merged": merged}


@pytest.mark.parametrize("rank", RANKS)
def test_accumulated_changes_of_a_residual_block(rank: int | str) -> None:
    with seeded(6):
        net = Net([Block()], real(4))
    hand = ByHand(net, run_block, ["into", "inner", "out"], rank_of(rank))
    stem, edge, inner, merged = (hand.columns(name) for name in ("stem", "edge", "inner", "merged"))

    def s(steps: list[Tensor]) -> Tensor:
        # every executed player adds ⟨h, δ(out)⟩ − ⟨∂L/∂in, δ(in)⟩; the input of the network does not move
        change = hand.changes(steps)
        total = stem.T @ change["stem"]
        if len(steps) == 1:
            return total
        total = total + inner.T @ change["inner"] - edge.T @ change["edge"]
        assert (total - merged.T @ change["merged"]).abs().max() > 1e-4  # equal to first order only
        return total

    opt = hand.check(net, rank, s)
    assert not is_chain(net.model, opt, net.batches[0][0])


# --- parameters whose effect is not seen at any layer ---


class Loose(nn.Module):
    """A shift that no layer applies: a parameter of the model itself, or of a module that is never called."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        shift = nn.Parameter(torch.randn(5))
        self.shift = shift if own else nn.ParameterList([shift])
        self.into, self.out = nn.Linear(4, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return run_loose(self, x)[0]


def run_loose(model: Any, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    stem = model.into(x)
    shift = model.shift if isinstance(model.shift, Tensor) else model.shift[0]
    return model.out((stem + shift).tanh()), {"stem": stem}


@pytest.mark.filterwarnings("ignore:.*(no adapter is registered|its calls were not seen)")
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("rank", [1, 3])
def test_parameters_outside_the_layers_act_first_and_are_predicted(rank: int, own: bool) -> None:
    with seeded(7):
        net = Net([Loose(own)], real(4))
    hand = ByHand(net, run_loose, ["shift", "into", "out"], rank)
    stem, G = hand.columns("stem"), list(hand.policy.G)
    G[0] = torch.outer(G[0].sum(1), sizes(rank) / B)
    hand.policy = replace(hand.policy, G=G)

    def s(steps: list[Tensor]) -> Tensor:
        predicted = G[0].T @ steps[0]
        return predicted if len(steps) == 1 else predicted + stem.T @ hand.changes(steps)["stem"]

    hand.check(net, rank, s)


# --- is it a chain? ---


def is_chain(model: nn.Module, opt: OCNOpt, x: Tensor) -> bool:
    """As the engine's tape sees a forward and backward pass."""
    opt.zero_grad()
    model(x).sum().backward()
    assert opt._tape is not None
    (this,) = opt._tape.passes
    return this.chain


def tail() -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(4 * 2 * 2, CLASSES)]


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 4, 3, 2, 1), nn.Conv2d(2, 4, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


CHAINS: dict[str, list[nn.Module]] = {
    "in-place activations and pooling": [
        *[nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)],
        *[nn.BatchNorm2d(4), nn.SiLU(inplace=True), nn.Conv2d(4, 4, 1), nn.AvgPool2d(1)],
        *tail(),
    ],
    "a residual without parameters inside": [nn.Conv2d(2, 4, 3, 2, 1), Residual(nn.Tanh()), *tail()],
    "nested": [nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1), nn.Sequential(nn.ELU(inplace=True))), nn.Sequential(*tail())],
}
NOT_CHAINS: dict[str, list[nn.Module]] = {
    "residual": [nn.Conv2d(2, 4, 3, 2, 1), Residual(nn.Conv2d(4, 4, 3, 1, 1)), nn.ReLU(inplace=True), *tail()],
    "residual from the input": [Residual(nn.Conv2d(2, 2, 3, 1, 1)), Residual(nn.Conv2d(2, 2, 1)), nn.MaxPool2d(2)],
    "parallel": [Parallel(), nn.ReLU(inplace=True), *tail()],
}


@pytest.mark.parametrize("name", [*CHAINS, *NOT_CHAINS])
def test_chains_are_recognised(name: str) -> None:
    model = nn.Sequential(*(CHAINS | NOT_CHAINS)[name])
    x = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    assert is_chain(model, OCNOpt(model.parameters(), model=model, feedback="nonlinear"), x) == (name in CHAINS)


@pytest.mark.parametrize("name", ["mlp", "convolution", "mixed", "words"])
def test_the_networks_of_these_tests_are_chains(name: str) -> None:
    net = make(name)
    assert is_chain(net.model, optimizer(net, feedback="nonlinear"), net.batches[0][0])

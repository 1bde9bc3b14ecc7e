"""Games over groups of samples, and over a network that runs again, in two processes that share each batch."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
from tests.dist.checks_ddp import ROWS, alone, assert_two_equal_one, loss_of, together
from tests.dist.two import SIZE, assert_close, assert_same_everywhere, mine
from tests.toys import FEATURES, batches, mlp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

GAMES: list[dict[str, Any]] = [
    {"curvature": curvature, "feedback": feedback, "rank": rank, "bellman": bellman}
    for curvature, (feedback, rank), bellman in product(
        ("identity", "adaptive", "kronecker"),
        [("linear", 3), ("linear", "full"), ("nonlinear", 1), ("nonlinear", 3), ("nonlinear", "full")],
        ("consistent", "paper"),
    )
]
SOME: list[dict[str, Any]] = [
    {"curvature": "identity", "feedback": "linear", "rank": 3},
    {"curvature": "adaptive", "feedback": "nonlinear", "rank": 1, "bellman": "paper"},
    {"curvature": "kronecker", "feedback": "nonlinear", "rank": 5},
]


class Residual(nn.Module):
    """Not a chain: its rollout goes by stages, or adds changes up layer by layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.body, self.skip = nn.Linear(FEATURES, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.norm, self.last = nn.LayerNorm(3), nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x).tanh())
        y: Tensor = self.last(self.body(x).tanh() + self.skip(x))
        return y


def two_equal_one(rank: int) -> None:
    for options in GAMES:
        assert_two_equal_one(mlp(), rank, options | {"eps": 1e-2})


def two_equal_one_by_stages(rank: int) -> None:
    for options in [*SOME, SOME[1] | {"game": "noncooperative"}, SOME[2] | {"state": "accumulated"}]:
        assert_two_equal_one(Residual().double(), rank, options | {"eps": 1e-2})


def steps_are_the_same(rank: int, options: dict[str, Any], cuts: list[list[int]], **more: Any) -> None:
    """``cuts``: how many rows there are in each pass of each process."""
    net, twin = Residual().double(), Residual().double()
    (model, opt), its = together(net, **options, **more), alone(twin, **options)
    for x, y in batches(3, size=ROWS):
        opt.zero_grad()
        its.zero_grad()
        sizes = [n for theirs in cuts for n in theirs]
        before = sum(map(len, cuts[:rank]))
        parts = list(zip(x.split(sizes), y.split(sizes), strict=True))[before : before + len(cuts[rank])]
        for i, part in enumerate(parts):
            with model.no_sync() if i < len(parts) - 1 else nullcontext():
                loss_of(model, *part).backward()
        opt.step()
        cross_entropy(twin(x), y).backward()
        its.step()
        assert_close(net.parameters(), twin.parameters(), *((1e-5, 1e-7) if "gauss_newton" in options else ()))
    assert_same_everywhere(net.parameters())


def uneven_batches(rank: int) -> None:
    for options in SOME:
        steps_are_the_same(rank, options, [[10], [6]])


def an_empty_batch(rank: int) -> None:
    for options in SOME:
        steps_are_the_same(rank, options, [[0], [16]])
        steps_are_the_same(rank, options, [[16], [0]])


def an_empty_batch_of_a_wide_layer(rank: int) -> None:
    """One process has all samples and could do without their gradients (the Gram form), but the other has none."""
    net, twin = mlp(width=64), mlp(width=64)
    (model, opt), its = together(net, curvature="identity", rank="full"), alone(twin, curvature="identity", rank="full")
    for x, y in batches(2, size=4):
        opt.zero_grad()
        its.zero_grad()
        rows = slice(0, 4 if rank == 0 else 0)
        loss_of(model, x[rows], y[rows], 4).backward()
        cross_entropy(twin(x), y).backward()
        opt.step()
        its.step()
        assert_close(net.parameters(), twin.parameters())


def accumulation(rank: int) -> None:
    for options in SOME:
        steps_are_the_same(rank, options, [[4, 4], [4, 4]])
        steps_are_the_same(rank, options, [[3, 2, 5], [6, 0]])


def accumulation_said_beforehand(rank: int) -> None:
    for groups in (3, 4, "full"):
        steps_are_the_same(rank, {"rank": groups}, [[4, 4], [4, 4]], accumulate=2)


def accumulation_that_begins_with_few_rows(rank: int) -> None:
    """Each process plans by its own first pass with any samples; the gradient is that of all of them."""
    for cuts in ([[1, 4], [6, 5]], [[0, 5], [6, 5]], [[0, 0], [8, 8]]):
        for groups in (3, 8):
            options: dict[str, Any] = {"curvature": "identity", "rank": groups, "gauss_newton": 1e-4, "momentum": 0.0}
            steps_are_the_same(rank, options, cuts, accumulate=2)  # with hardly any feedback groups do not matter


def clipped(rank: int) -> None:
    for options in SOME:
        net, twin = Residual().double(), Residual().double()
        (model, opt), its = together(net, **options), alone(twin, **options)
        for x, y in batches(3, size=ROWS):
            opt.zero_grad()
            its.zero_grad()
            cross_entropy(model(*mine(rank, x)), *mine(rank, y)).backward()
            cross_entropy(twin(x), y).backward()
            for each, network in ((opt, net), (its, twin)):
                nn.utils.clip_grad_norm_(network.parameters(), 0.1)
                each.step()
            assert_close(net.parameters(), twin.parameters(), 1e-7)


def a_layer_that_one_process_does_not_use(rank: int) -> None:
    class Optional(Residual):
        def forward(self, x: Tensor, detour: bool) -> Tensor:  # type: ignore[override]
            x = self.norm(self.first(x).tanh())
            y: Tensor = self.last(self.body(x).tanh() if detour else self.skip(x))
            return y

    options: dict[str, Any] = {"rank": 4, "curvature": "identity"}
    net, twin = Optional().double(), Optional().double()
    (model, opt), its = together(net, {"find_unused_parameters": True}, **options), alone(twin, **options)
    for x, y in batches(3, size=ROWS):
        opt.zero_grad()
        its.zero_grad()
        cross_entropy(model(*mine(rank, x), rank == 1), *mine(rank, y)).backward()
        opt.step()
        for i in range(SIZE):
            (cross_entropy(twin(*mine(i, x), i == 1), *mine(i, y)) / SIZE).backward()
        its.step()
        assert_close(net.parameters(), twin.parameters())


def a_layer_that_is_not_called(rank: int) -> None:
    """It acts before the network runs again, and what it changes is predicted: once, not by each process."""
    net, twin = Residual().double(), Residual().double()
    for network in (net, twin):
        network.extra = nn.Linear(2, 2, bias=False, dtype=torch.float64)
        nn.init.ones_(network.extra.weight)
    (model, opt), its = together(net, feedback="nonlinear"), alone(twin, feedback="nonlinear")
    for x, y in batches(3, size=ROWS):
        opt.zero_grad()
        its.zero_grad()
        (cross_entropy(model(*mine(rank, x)), *mine(rank, y)) + net.extra.weight.square().sum()).backward()
        (cross_entropy(twin(x), y) + twin.extra.weight.square().sum()).backward()
        with warnings.catch_warnings(action="ignore"):  # both say so
            opt.step()
            its.step()
        assert_close(net.parameters(), twin.parameters())


CHECKS = [
    two_equal_one,
    two_equal_one_by_stages,
    uneven_batches,
    an_empty_batch,
    an_empty_batch_of_a_wide_layer,
    accumulation,
    accumulation_said_beforehand,
    accumulation_that_begins_with_few_rows,
    clipped,
    a_layer_that_one_process_does_not_use,
    a_layer_that_is_not_called,
]

"""Every step of a game, and its value function, against the dense solver on the same network as a Markov chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exact.compare import assert_close
from tests.exact.nets import seeded
from tests.games import markov
from tests.games.markov import Chain
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt, reference

B, BETA, LR, DECAY = 7, 0.7, 0.8, 0.01
RANKS: list[int | str] = [1, 3, "full"]

Make = Callable[[], tuple[nn.Module, Chain, Tensor, Any]]


def residual(projection: bool, late: int | None) -> tuple[nn.Module, Chain, Tensor, Any]:
    model = markov.Residual(projection)
    return model, markov.residual_chain(model, late), torch.randn(B, 5), late or 0


NETS: dict[str, Make] = {
    "identity skip": lambda: residual(False, None),
    "projection skip, first": lambda: residual(True, 0),
    "projection skip, last": lambda: residual(True, 1),
    "norms": lambda: (markov.Normed(), markov.normed_chain(0), torch.randn(B, 5), "first"),
    "norms, late": lambda: (markov.Normed(), markov.normed_chain(1), torch.randn(B, 5), "last"),
    "inception": lambda: (markov.Inception(), markov.inception_chain(False), torch.randn(B, 5), "first"),
    "inception, late": lambda: (markov.Inception(), markov.inception_chain(True), torch.randn(B, 5), "last"),
    "attention": lambda: (markov.Attention(), markov.attention_chain(), torch.randn(B, markov.TOKENS, 2), "first"),
    "dense": lambda: (markov.Dense(), markov.dense_chain(), torch.randn(B, 5), "first"),
}


class Case:
    def __init__(self, name: str, rank: int | str) -> None:
        with seeded(3), torch.no_grad():
            self.model, self.chain, x, self.alignment = NETS[name]()
            self.model, self.x = self.model.double(), x.double()
            for p in self.model.parameters():
                p.mul_(1.5)
            self.y = torch.randint(markov.CLASSES, (B,))
        self.rank = rank
        self.layers, self.thetas = self.chain.layers(self.model)
        self.cost = reference.grouped_cost(self.loss, B if rank == "full" else int(rank), BETA)

    def loss(self, output: Tensor) -> Tensor:
        return cross_entropy(output, self.y)

    def dense(self, **options: Any) -> reference.Solution:
        metric = [torch.eye(len(t), dtype=t.dtype) / (LR if options.get("mode") != "paper" else 1) for t in self.thetas]
        costs = [DECAY * t for t in self.thetas]
        step = LR if options.get("mode") == "paper" else 1.0
        return reference.solve(self.layers, self.thetas, self.x, self.cost, metric, costs, step=step, **options)

    def optimizer(self, **options: Any) -> OCNOpt:
        fixed = {"curvature": "identity", "lr": LR, "weight_decay": DECAY, "gauss_newton": BETA, "clamp": False}
        fixed |= {"momentum": 0.0, "rank": self.rank, "alignment": self.alignment, "model": self.model}
        return OCNOpt(self.model.parameters(), **(fixed | options))

    def step(self, opt: OCNOpt) -> list[Tensor]:
        """δθ of each stage."""
        before = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        opt.zero_grad()
        self.loss(self.model(self.x)).backward()
        opt.step()
        delta = {n: p.detach() - before[n] for n, p in self.model.named_parameters()}
        named = [[delta[n] for m in names for n in delta if n.startswith(f"{m}.")] for names in self.chain.players]
        return [torch.cat([d.flatten() for d in stage]) for stage in named]

    def check(self, opt: OCNOpt, expected: reference.Solution) -> None:
        for k, step in enumerate(self.step(opt)):
            assert_close(step, expected.dtheta[k], f"δθ of stage {k}")
        D = self._adjoints(expected)
        for k, columns in enumerate(D):
            a, Sigma = opt.diagnostics.policy.value(k)
            scale = float(columns.abs().max()) if sum(expected.projections) else 0.0  # then V_xx may be zero
            assert_close(columns @ a, expected.Vx[k], f"V_x of stage {k}", scale)
            assert_close(columns @ Sigma @ columns.T, expected.Vxx[k], f"V_xx of stage {k}", scale**2)

    def _adjoints(self, s: reference.Solution) -> list[Tensor]:
        """D_k of every stage: one column a group."""
        r = B if self.rank == "full" else int(self.rank)
        member = torch.eye(r, dtype=torch.float64)[torch.arange(B) * r // B]
        last = torch.einsum("bi,bg->big", s.Vx[-1].view(B, -1), member).reshape(-1, r)
        D = [last]
        for fx in reversed(s.fx):
            D.insert(0, fx.T @ D[0])
        return D


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("mode", ["consistent", "paper"])
def test_cooperative_game(name: str, rank: int | str, mode: str) -> None:
    case = Case(name, rank)
    opt = case.optimizer(feedback="nonlinear", bellman=mode)
    case.check(opt, case.dense(mode=mode))
    assert opt.game.why_accumulated is None
    assert [set(stage.players) for stage in opt.game.stages] == [set(names) for names in case.chain.players]


@pytest.mark.parametrize("feedback", ["nonlinear", "linear"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", NETS)
def test_noncooperative_game(name: str, rank: int | str, feedback: str) -> None:
    case = Case(name, rank)
    opt = case.optimizer(feedback=feedback, game="noncooperative")
    case.check(opt, case.dense(rollout=feedback, players=case.chain.sizes(case.model)))

"""Fictitious players: θ is a sum of N of them, which share the gradient and plan together, eq. (robust-traj)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.exact.compare import assert_close
from tests.exact.nets import seeded
from tests.toys import assert_identical, batches, mlp, name_of, state_of, train, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt, reference
from ocnopt.bucket import Bucket

CURVATURES = ["identity", "adaptive", "kronecker"]
FEEDBACK = ["off", "linear", "nonlinear"]


def run(steps: int = 4, **options: Any) -> tuple[nn.Module, OCNOpt]:
    with seeded(0):
        model = mlp().double()
    opt = OCNOpt(model.parameters(), model=model, damping=0.1, eps=1e-3, **options)
    train(model, opt, batches(steps))
    return model, opt


@pytest.mark.parametrize("feedback", FEEDBACK)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_one_player_is_no_transformation(curvature: str, feedback: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a bit differs from a problem that knows of no such players: all sums and shares left out."""
    game = {"curvature": curvature, "feedback": feedback, "lr": 0.1, "weight_decay": 0.01}
    a, of_a = run(players=1, **game)
    monkeypatch.setattr(Bucket, "fictitious", Nothing())
    b, of_b = run(**game)
    assert_identical(values(a), values(b))
    assert_identical(state_of(of_a), state_of(of_b))


class Nothing:
    """A factor that leaves everything as it is, whatever it is."""

    def __mul__(self, other: Any) -> Any:
        return other

    def __rtruediv__(self, other: float) -> float:
        return 1.0


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("feedback", FEEDBACK)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_in_consistent_mode_they_are_a_larger_learning_rate(curvature: str, feedback: str, rank: int) -> None:
    """Without a linear cost, that is without momentum and weight decay."""
    game = {"curvature": curvature, "feedback": feedback, "rank": rank, "momentum": 0.0}
    (a, _), (b, _) = run(players=3, lr=0.02, **game), run(lr=0.06, **game)
    for x, y in zip(values(a), values(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


DIFFERENT = [{"bellman": "paper", "momentum": 0.0}, {"momentum": 0.0, "weight_decay": 0.1}]


@pytest.mark.parametrize("game", DIFFERENT, ids=name_of)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_elsewhere_they_are_not(curvature: str, game: dict[str, Any]) -> None:
    (a, _), (b, _) = run(players=3, lr=0.02, curvature=curvature, **game), run(lr=0.06, curvature=curvature, **game)
    gap = max(float((x - y).abs().max()) for x, y in zip(values(a), values(b), strict=True))
    assert gap > 1e-5


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("mode", ["consistent", "paper"])
@pytest.mark.parametrize("N", [2, 3])
def test_against_the_dense_solver_with_n_copies(N: int, mode: str, rank: int) -> None:
    """There θ_k = [θ_{k,1}, …, θ_{k,N}], each with a metric of its own, and layer k applies their sum."""
    lr, decay, beta = 0.3, 0.05, 0.6
    with seeded(2):
        pieces = [nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 3)]
    model = nn.Sequential(*pieces).double()
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 4, generator=g, dtype=torch.float64), torch.randint(3, (6,), generator=g)

    def summed(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda X, thetas: f(X, thetas.view(N, -1).sum(0))

    stages = [reference.stage(piece) for piece in pieces]
    layers, thetas = [summed(f) for f, _ in stages], [(theta / N).repeat(N) for _, theta in stages]
    metric = [torch.eye(len(t), dtype=t.dtype) / (lr if mode == "consistent" else 1) for t in thetas]
    cost = reference.grouped_cost(lambda out: cross_entropy(out, y), rank, beta)
    step = lr if mode == "paper" else 1.0
    costs = [decay * t for t in thetas]
    expected = reference.solve(layers, thetas, x, cost, metric, costs, mode=mode, step=step)

    before = [torch.cat([p.detach().flatten() for p in piece.parameters()]) for piece in pieces]
    opt = OCNOpt(
        model.parameters(), lr, model=model, curvature="identity", feedback="nonlinear", rank=rank, bellman=mode,
        gauss_newton=beta, weight_decay=decay, momentum=0.0, clamp=False, players=N,
    )  # fmt: skip
    cross_entropy(model(x), y).backward()
    opt.step()
    for k, piece in enumerate(pieces):
        after = torch.cat([p.detach().flatten() for p in piece.parameters()])
        assert_close(after - before[k], expected.dtheta[k].view(N, -1).sum(0), f"δθ of stage {k}")
        a, _ = opt.diagnostics.policy.value(k)
        assert torch.isfinite(a).all()


def test_groups_may_have_their_own_number() -> None:
    with seeded(0):
        model = mlp().double()
    groups = [{"params": [p], "players": n} for p, n in zip(model.parameters(), (1, 2, 3, 4), strict=False)]
    opt = OCNOpt(groups, 0.05, curvature="identity", momentum=0.0, feedback="off")
    before = [p.clone() for p in values(model)]
    train(model, opt, batches(1))
    for p, old, n in zip(model.parameters(), before, (1, 2, 3, 4), strict=False):
        torch.testing.assert_close(old - p.detach(), n * 0.05 * p.grad)

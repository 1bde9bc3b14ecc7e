"""The leading singular vector from r×r matrices, against the SVD of the gain that the dense reference forms."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn.functional import cross_entropy

from ocnopt.lab.reproduce.gain import leading_gains
from ocnopt.reference import grouped_cost, solve, stage

B, LR, BETA = 6, 0.3, 0.7


def network() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(B, 5, dtype=torch.float64, generator=generator), torch.arange(B) % 3


def curvature(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {n: 0.5 + torch.rand(p.shape, dtype=torch.float64, generator=generator) for n, p in model.named_parameters()}


@pytest.mark.parametrize("rank", [None, 3, 1])
@pytest.mark.parametrize("scaled", [False, True])
def test_equals_the_svd_of_the_dense_gain(rank: int | None, scaled: bool) -> None:
    model, (x, y) = network(), batch()
    diagonal = curvature(model) if scaled else {n: torch.ones_like(p) for n, p in model.named_parameters()}
    parts = [model[0:2], model[2:4], model[4:5]]
    layers, thetas = zip(*map(stage, parts), strict=True)
    names = [("0.weight", "0.bias"), ("2.weight", "2.bias"), ("4.weight", "4.bias")]
    metric = [torch.diag(torch.cat([diagonal[n].flatten() for n in pair])) / LR for pair in names]
    terminal = grouped_cost(lambda X: cross_entropy(X, y), rank or B, BETA)
    dense = solve(layers, thetas, x, terminal, metric)
    gains = leading_gains(model, x, y, lr=LR, rank=rank, gauss_newton=BETA, curvature=diagonal if scaled else None)
    assert [gain.layer for gain in gains] == ["0", "2", "4"]
    for k, gain in enumerate(gains):
        _, S, Vh = torch.linalg.svd(dense.K[k])
        r = min(len(gain.singular_values), len(S))
        torch.testing.assert_close(gain.singular_values[:r], S[:r], rtol=1e-6, atol=1e-9)
        v = gain.state.flatten()
        torch.testing.assert_close(v * (v @ Vh[0]).sign(), Vh[0])
        before = nn.Sequential(*parts[:k]) if k else nn.Identity()
        jacobian = jacrev(lambda z, f=before: f(z))(x).reshape(gain.state.numel(), x.numel())
        torch.testing.assert_close(gain.image.flatten(), jacobian.T @ v)


def test_samples_of_a_group_share_their_coefficient() -> None:
    model, (x, y) = network(), batch()
    c = leading_gains(model, x, y, lr=LR, rank=3)[1].coefficients
    assert torch.equal(c[0::2], c[1::2])
    assert len(c.unique()) == 3


def test_a_layer_that_is_called_twice_is_refused() -> None:
    shared = nn.Linear(5, 5).double()
    x, _ = batch()
    with pytest.raises(ValueError, match="model calls 0 twice: it is no chain"):
        leading_gains(nn.Sequential(shared, nn.Tanh(), shared), x, torch.arange(B) % 5, lr=LR)

"""Theorem 1, Corollary 2, Proposition 3, Corollary 4 and Appendix B.1 of the paper, by name."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import grad, vjp
from torch.nn.functional import cross_entropy

from ocnopt.reference import Solution, grouped_cost, solve, stage, states

B = 5
WIDTHS = [4, 5, 3, 3]
TARGETS = torch.tensor([0, 2, 1, 2, 0])
BETA = 0.7


def loss(X: Tensor) -> Tensor:
    return cross_entropy(X, TARGETS)


def exact_cost(X: Tensor) -> tuple[Tensor, Tensor]:
    return grad(loss)(X).flatten(), hessian(loss, X).reshape(X.numel(), X.numel())


def spd(size: int) -> Tensor:
    A = torch.randn(size, size, dtype=torch.float64)
    return A @ A.T / size + 0.1 * torch.diag(1 + torch.arange(size, dtype=torch.float64))


def identities() -> list[Tensor]:
    return [torch.eye(len(theta), dtype=torch.float64) for theta in THETAS]


def random_metric() -> list[Tensor]:
    torch.manual_seed(7)
    return [spd(len(theta)) for theta in THETAS]


def build() -> tuple[list, list[Tensor], Tensor]:
    torch.manual_seed(5)
    pieces = [nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in pairwise(WIDTHS)]
    layers, thetas = zip(*(stage(piece) for piece in pieces), strict=True)
    return list(layers), list(thetas), torch.randn(B, WIDTHS[0], dtype=torch.float64)


LAYERS, THETAS, X0 = build()
DEPTH = len(LAYERS)


def loss_from(k: int, x: Tensor, theta: Tensor) -> Tensor:
    """The loss as a function of the state and the parameters of layer k."""
    return loss(states(LAYERS[k:], [theta, *THETAS[k + 1 :]], x)[-1])


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


def pull_back(s: Solution, k: int, vector: Tensor) -> tuple[Tensor, Tensor]:
    """f_x^T v and f_u^T v by reverse-mode differentiation, never through the solver's Jacobians."""
    q, p = vjp(LAYERS[k], s.X[k], THETAS[k])[1](vector.view_as(s.X[k + 1]))
    return q.flatten(), p


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_theorem_1_dynamic_programming_is_backpropagation_and_gradient_descent(decay: float) -> None:
    def first_order(X: Tensor) -> tuple[Tensor, Tensor]:
        return grad(loss)(X).flatten(), torch.zeros(X.numel(), X.numel(), dtype=torch.float64)

    cost = [decay * theta for theta in THETAS]
    # Q_xx = 0 and Q_ux = 0 follow from V_xx = 0 at the end; nothing has to be switched off.
    s = solve(LAYERS, THETAS, X0, first_order, identities(), cost, mode="paper")
    for k in range(DEPTH):
        gx, gu = grad(loss_from, argnums=(1, 2))(k, s.X[k], THETAS[k])
        assert not s.Qxx[k].any()
        assert not s.Qxu[k].any()
        assert_close(s.Vx[k], gx.flatten())
        assert_close(THETAS[k] + s.dtheta[k], THETAS[k] - (gu + decay * THETAS[k]))


def test_corollary_2_without_q_ux_ddp_is_newtons_method() -> None:
    decay = 0.5  # large enough for every diagonal block of the Hessian to be positive definite
    cost, metric = [decay * theta for theta in THETAS], [decay * eye for eye in identities()]
    s = solve(LAYERS, THETAS, X0, exact_cost, metric, cost, mode="second_order", feedback=False)

    def regularised(theta: Tensor, k: int) -> Tensor:
        return loss_from(k, s.X[k], theta) + decay / 2 * theta @ theta

    for k in range(DEPTH):
        gradient, H = grad(regularised)(THETAS[k], k), hessian(partial(regularised, k=k), THETAS[k])
        n = s.X[k].numel()
        assert_close(s.Vx[k], grad(loss_from, argnums=1)(k, s.X[k], THETAS[k]).flatten())
        assert_close(s.Vxx[k], hessian(lambda x, k=k: loss_from(k, x, THETAS[k]), s.X[k]).reshape(n, n))
        assert_close(s.Quu[k], H)
        assert_close(s.dtheta[k], -torch.linalg.solve(H, gradient))


def test_second_order_mode_has_the_mixed_derivatives_of_the_loss() -> None:
    k, decay = DEPTH - 1, 0.5
    s = solve(LAYERS, THETAS, X0, exact_cost, [decay * eye for eye in identities()], mode="second_order")
    (Hxx, Hxu), (_, Huu) = hessian(partial(loss_from, k), (s.X[k], THETAS[k]))
    Quu = Huu + decay * torch.eye(len(Huu), dtype=torch.float64)
    n = s.X[k].numel()
    Qxx, Qxu = Hxx.reshape(n, n), Hxu.reshape(n, -1)
    assert_close(s.Qxx[k], Qxx)
    assert_close(s.Qxu[k], Qxu)
    assert_close(s.Quu[k], Quu)
    assert_close(s.Vxx[k], Qxx - Qxu @ torch.linalg.solve(Quu, Qxu.T))
    assert_close(s.dtheta[k], -torch.linalg.solve(Quu, s.Qu[k] + Qxu.T @ s.dx[k]))


def test_corollary_2_with_identity_q_uu_it_is_gradient_descent() -> None:
    s = solve(LAYERS, THETAS, X0, exact_cost, identities(), mode="paper", feedback=False)
    assert any(Vxx.any() for Vxx in s.Vxx[:-1])  # unlike Theorem 1: V_xx is there and must not matter
    for k in range(DEPTH):
        gx, gu = grad(loss_from, argnums=(1, 2))(k, s.X[k], THETAS[k])
        assert_close(s.Vx[k], gx.flatten())
        assert_close(s.dtheta[k], -gu)


@pytest.mark.parametrize("mode", ["consistent", "paper"])
def test_proposition_3_outer_product_factorisation(mode: str) -> None:
    torch.manual_seed(11)
    y = 0.2 * torch.randn(B * WIDTHS[-1], dtype=torch.float64)
    cost = [0.01 * theta for theta in THETAS]

    def terminal(X: Tensor) -> tuple[Tensor, Tensor]:
        return grad(loss)(X).flatten(), torch.outer(y, y)

    s = solve(LAYERS, THETAS, X0, terminal, random_metric(), cost, mode=mode)
    assert sum(s.projections) == 0
    r = y
    for k in reversed(range(DEPTH)):
        q, p = pull_back(s, k, r)
        assert_close(s.Qxx[k], torch.outer(q, q))
        assert_close(s.Qxu[k], torch.outer(q, p))
        r = torch.sqrt(1 - p @ torch.linalg.pinv(s.Quu[k], hermitian=True) @ p) * q
        assert_close(s.Vxx[k], torch.outer(r, r))


@pytest.mark.parametrize("mode", ["consistent", "paper"])
def test_corollary_4_the_value_is_a_rescaled_gradient(mode: str) -> None:
    s = solve(LAYERS, THETAS, X0, grouped_cost(loss, 1, BETA), random_metric(), mode=mode)
    assert sum(s.projections) == 0
    alpha = [torch.tensor(BETA, dtype=torch.float64)]
    for k in reversed(range(DEPTH)):
        gx, gu = grad(loss_from, argnums=(1, 2))(k, s.X[k], THETAS[k])
        shrink = 1 - alpha[0] ** 2 * gu @ torch.linalg.pinv(s.Quu[k], hermitian=True) @ gu
        assert 0 < shrink < 0.999
        alpha.insert(0, shrink.sqrt() * alpha[0])
        ratio = torch.stack([(a / b) ** 2 for a, b in pairwise(alpha)]).prod()
        assert_close(s.Vx[k], ratio * gx.flatten())
        assert_close(s.Vxx[k], alpha[0] ** 2 * torch.outer(gx.flatten(), gx.flatten()))


@pytest.mark.parametrize("mode", ["consistent", "paper"])
def test_appendix_b1_higher_rank_with_the_corrected_sign(mode: str) -> None:
    torch.manual_seed(13)
    N = 3
    Y = 0.2 * torch.randn(B * WIDTHS[-1], N, dtype=torch.float64)

    def terminal(X: Tensor) -> tuple[Tensor, Tensor]:
        return grad(loss)(X).flatten(), Y @ Y.T

    s = solve(LAYERS, THETAS, X0, terminal, random_metric(), mode=mode)
    assert sum(s.projections) == 0
    R = Y
    for k in reversed(range(DEPTH)):
        columns = [pull_back(s, k, R[:, i]) for i in range(N)]
        q, p = (torch.stack(list(vectors), 1) for vectors in zip(*columns, strict=True))
        assert_close(s.Qxx[k], sum(torch.outer(q[:, i], q[:, i]) for i in range(N)))
        assert_close(s.Qxu[k], sum(torch.outer(q[:, i], p[:, i]) for i in range(N)))
        overlap = p.T @ torch.linalg.pinv(s.Quu[k], hermitian=True) @ p
        S = torch.eye(N, dtype=torch.float64) - overlap
        assert_close(s.Vxx[k], q @ S @ q.T)
        printed = q @ (torch.eye(N, dtype=torch.float64) + overlap) @ q.T  # the sign in the paper's text
        assert float((s.Vxx[k] - printed).abs().max()) > 1e-3 * float(printed.abs().max())
        sigma, U = torch.linalg.eigh(S)
        R = q @ U * sigma.sqrt()
        assert_close(s.Vxx[k], R @ R.T)

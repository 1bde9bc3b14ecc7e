"""Proposition 5 and the integration time against the dense matrix ODEs of the appendix, in float64."""

from __future__ import annotations

import pytest
import torch
from tests.ode.fields import Net, batch
from torch import Tensor

from ocnopt.ode import Horizon, NeuralODE
from ocnopt.reference.ode import DenseODE, backward

T = 0.8
GAMMA = 0.2


def solved(gradient: str) -> tuple[Tensor, Tensor, DenseODE]:
    """q_0 and p_0 of the block, and the dense solution."""
    block = NeuralODE(Net(2, 3), t=(0.0, T), gradient=gradient, rtol=1e-11, atol=1e-11)
    x = batch(2, 2).requires_grad_()
    out = block(x)
    loss = (out - torch.tensor([1.0, -0.5], dtype=torch.float64)).square().sum()
    (L_x,) = torch.autograd.grad(loss, out, retain_graph=True)
    q, *p = torch.autograd.grad(loss, [x, *block.field.parameters()])
    dense = backward(block.field, out, L_x, (0.0, T), gamma=GAMMA, steps=60)
    return q.flatten(), torch.cat([g.flatten() for g in p]), dense


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-7, atol=1e-8 * float(b.abs().max()))


@pytest.mark.parametrize("gradient", ["adjoint", "discretize"])
def test_the_matrices_factorise(gradient: str) -> None:
    q, p, dense = solved(gradient)
    assert close(q, dense.q)
    assert close(p, dense.p)
    assert close(torch.outer(q, q), dense.Q_xx)
    assert close(torch.outer(q, p), dense.Q_xu)
    assert close(torch.outer(p, p) + GAMMA * T * torch.eye(len(p), dtype=p.dtype), dense.Q_uu)


def test_the_cross_term_of_time_and_parameters_is_psi_times_the_gradient() -> None:
    q, p, dense = solved("adjoint")
    assert close(dense.psi * q, dense.Q_Tx)
    assert close(dense.psi * p, dense.Q_Tu)


def test_the_feedback_step_is_the_minimum_of_the_dense_quadratic_model() -> None:
    _, p, dense = solved("adjoint")
    step, c = 0.01 * torch.cos(torch.arange(len(p), dtype=torch.float64)), 0.7
    Q_T, Q_TT = c * T + dense.psi, c + dense.psi**2
    wanted = -(Q_T + dense.Q_Tu @ step) / Q_TT
    found = Horizon(penalty=c, lr=1.0).step(T, float(dense.psi), float(p @ step))
    assert found == pytest.approx(float(wanted), rel=1e-6)

"""Flows: log-likelihoods against densities that are known, traces against each other, samples, curvature."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from ocnopt import OCNOpt
from ocnopt.lab.models import Flow, build
from ocnopt.lab.models.ode.flow import FlowField, exact_trace, log_normal
from ocnopt.ode import NeuralODE
from ocnopt.ode.layers import ConcatLinear, TimeSequential

A = torch.tensor([[0.3, -0.7, 0.2], [0.5, -0.4, 0.1], [0.0, 0.6, 0.8]], dtype=torch.float64)


class LinearField(nn.Module):
    """dz/dt = A z + b."""

    def __init__(self) -> None:
        super().__init__()
        self.A, self.b = nn.Parameter(A.clone()), nn.Parameter(torch.tensor([0.5, -1.0, 0.2], dtype=torch.float64))

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return z @ self.A.mT + self.b


def linear_flow(trace: str = "exact", gradient: str = "adjoint") -> Flow:
    block = NeuralODE(FlowField(LinearField()), (0.0, 1.5), rtol=1e-10, atol=1e-12, gradient=gradient)
    return Flow([block], 3, trace)


def gaussian() -> MultivariateNormal:
    """What the flow of a linear field makes of a Gaussian: z_T = E x + c with E = exp(A T), so x = E^-1 (z_T − c)."""
    T, b = 1.5, torch.tensor([0.5, -1.0, 0.2], dtype=torch.float64)
    E = torch.linalg.matrix_exp(A * T)
    c = torch.linalg.solve(A, (E - torch.eye(3, dtype=torch.float64)) @ b)
    back = torch.linalg.inv(E)
    return MultivariateNormal(-back @ c, back @ back.mT)


def points(count: int = 7) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("gradient", ["adjoint", "discretize"])
@pytest.mark.parametrize("training", [True, False])
def test_the_flow_of_a_linear_field_is_a_gaussian(gradient: str, training: bool) -> None:
    flow = linear_flow(gradient=gradient).train(training)
    torch.testing.assert_close(flow(points()), gaussian().log_prob(points()), rtol=1e-8, atol=1e-8)
    with torch.no_grad():
        torch.testing.assert_close(flow(points()), gaussian().log_prob(points()), rtol=1e-8, atol=1e-8)


def test_its_gradient_is_that_of_the_closed_form() -> None:
    flow = linear_flow()
    field = flow.blocks[0].field.net
    flow(points()).mean().backward()
    M, b = A.clone().requires_grad_(), torch.tensor([0.5, -1.0, 0.2], dtype=torch.float64, requires_grad=True)
    E = torch.linalg.matrix_exp(1.5 * M)
    z = points() @ E.mT + torch.linalg.solve(M, (E - torch.eye(3, dtype=torch.float64)) @ b)
    (log_normal(z) + 1.5 * M.trace()).mean().backward()
    torch.testing.assert_close(field.A.grad, M.grad, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(field.b.grad, b.grad, rtol=1e-6, atol=1e-7)


def test_samples_have_the_moments_of_the_gaussian() -> None:
    torch.manual_seed(0)
    drawn = linear_flow().sample(20000)
    known = gaussian()
    torch.testing.assert_close(drawn.mean(0), known.mean, rtol=0, atol=0.03)
    torch.testing.assert_close(drawn.T.cov(), known.covariance_matrix, rtol=0.03, atol=0.03)


def test_the_density_of_a_trained_field_integrates_to_one() -> None:
    flow = build("ffjord", (2,), 0, width=8, depth=2, rtol=1e-5, atol=1e-5).eval()
    for p in flow.parameters():
        nn.init.normal_(p, std=0.4, generator=torch.Generator().manual_seed(p.numel()))
    axis = torch.linspace(-8, 8, 161)
    with torch.no_grad():
        density = flow(torch.cartesian_prod(axis, axis)).exp()
    assert abs(float(density.sum()) * 0.1**2 - 1) < 1e-3


def test_the_exact_trace_is_that_of_the_jacobian() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    z = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    jacobians = torch.func.vmap(torch.func.jacrev(net))(z)
    torch.testing.assert_close(exact_trace(net(z), z), jacobians.diagonal(dim1=1, dim2=2).sum(1))


@pytest.mark.parametrize("trace", ["rademacher", "gaussian"])
def test_estimates_are_unbiased_and_belong_to_a_solve(trace: str) -> None:
    torch.manual_seed(0)
    flow = linear_flow(trace)
    x = points(2).repeat_interleave(4000, 0)
    found = flow(x).reshape(2, 4000).detach()
    exact = gaussian().log_prob(points(2))
    assert float(found.std(1).min()) > 0.1  # they are estimates
    torch.testing.assert_close(found.mean(1), exact, rtol=0, atol=5 * float(found.std(1).max()) / math.sqrt(4000))
    torch.testing.assert_close(flow.eval()(points()), gaussian().log_prob(points()), rtol=1e-8, atol=1e-8)


def test_rademacher_noise_is_exact_on_a_diagonal() -> None:
    flow = linear_flow("rademacher")
    with torch.no_grad():
        flow.blocks[0].field.net.A.copy_(torch.diag(torch.tensor([0.3, -0.2, 0.6], dtype=torch.float64)))
    torch.testing.assert_close(flow(points()), flow.eval()(points()), rtol=1e-8, atol=1e-8)
    gaussian_noise = linear_flow("gaussian")
    gaussian_noise.load_state_dict(flow.state_dict())
    assert not torch.allclose(gaussian_noise(points()), flow(points()), atol=1e-3)


@pytest.mark.parametrize("trace", ["exact", "rademacher", "gaussian"])
def test_all_layers_of_a_flow_have_kronecker_curvature(trace: str, recwarn: pytest.WarningsRecorder) -> None:
    flow = build("ffjord", (3,), 0, width=6, depth=1, flows=2, trace=trace, rtol=1e-3, atol=1e-3)
    optimizer = OCNOpt(flow.parameters(), 1e-2, model=flow, curvature="kronecker", refresh_every=2)
    x = points().float()
    for _ in range(3):
        optimizer.zero_grad()
        (-flow(x).mean()).backward()
        optimizer.step()
    assert [str(w.message) for w in recwarn] == []
    assert all(block.nfe.curvature > 0 for block in flow.blocks)


def test_several_flows_are_one_after_another() -> None:
    torch.manual_seed(0)
    flow = build("ffjord", (2,), 0, width=4, flows=2, rtol=1e-7, atol=1e-7).double().eval()
    x = torch.randn(5, 2, dtype=torch.float64)
    with torch.no_grad():
        z, first, *_ = flow.blocks[0]((x, torch.zeros(5, dtype=torch.float64)))
        torch.testing.assert_close(flow(x), Flow([flow.blocks[1]], 2).eval()(z) + first)
        torch.manual_seed(1)
        drawn, base = flow.sample(5), None
        torch.manual_seed(1)
        base = torch.randn(5, 2, dtype=torch.float64)
        for block in flow.blocks:
            drawn, *_ = block((drawn, torch.zeros(5, dtype=torch.float64)))
    torch.testing.assert_close(drawn, base, rtol=1e-5, atol=1e-5)


def test_a_field_of_ones_own() -> None:
    """Any module of the time and the state will do."""
    field = FlowField(TimeSequential(ConcatLinear(2, 5), nn.Softplus(), ConcatLinear(5, 2)))
    flow = Flow([NeuralODE(field)], 2, "gaussian")
    assert flow(torch.randn(4, 2)).shape == (4,)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3, 4), {}, r"input_shape must be \(features,\)"),
        ((3,), {"width": 0}, "width must be at least 1; got 0"),
        ((3,), {"flows": 0}, "flows must be at least 1; got 0"),
        ((3,), {"activation": "sine"}, "activation must be one of relu, tanh, softplus; got 'sine'"),
    ],
)
def test_bad_arguments_are_named(shape: tuple[int, ...], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("ffjord", shape, 0, **options)

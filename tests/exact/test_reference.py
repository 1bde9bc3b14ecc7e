"""The dense solver against formulas that are written out here and share no code with it."""

import ast
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ocnopt.reference.ddp
from ocnopt.reference import Solution, gauss_newton_step, grouped_cost, solve, stage, states

B = 5
RANKS = [1, 3, B]
DECAYS = [0.0, 0.01]
BETA = 0.7
TARGETS = torch.tensor([0, 2, 1, 2, 0])


def loss(X: Tensor) -> Tensor:
    return cross_entropy(X.reshape(B, -1), TARGETS)


def spd(size: int, scale: float = 1.0) -> Tensor:
    """A dense symmetric positive definite matrix, far from a multiple of the identity."""
    A = torch.randn(size, size, dtype=torch.float64)
    return scale * (A @ A.T / size + 0.1 * torch.diag(1 + torch.arange(size, dtype=torch.float64)))


def assert_close(actual: Tensor, expected: Tensor, scale: float | Tensor = 0.0) -> None:
    """Equal to 1e-12, relative to the largest entry or to `scale` where the answer itself may vanish."""
    assert actual.shape == expected.shape
    if expected.numel():
        largest = max(float(expected.abs().max()), float(scale))
        assert float((actual - expected).abs().max()) <= 1e-12 * largest


class Net:
    """A chain as the solver wants it, with a random metric and a linear cost for each stage."""

    def __init__(self, pieces: Sequence[nn.Module], X0: Tensor, decay: float = 0.01, scale: float = 1.0) -> None:
        self.X0 = X0
        self.layers, self.thetas = map(list, zip(*(stage(piece) for piece in pieces), strict=True))
        self.metric = [spd(len(theta), scale) for theta in self.thetas]
        self.linear_cost = [decay * theta for theta in self.thetas]

    def solve(self, rank: int = 1, **options: object) -> Solution:
        return solve(
            self.layers,
            self.thetas,
            self.X0,
            grouped_cost(loss, rank, BETA),
            options.pop("metric", self.metric),
            self.linear_cost,
            **options,
        )


def mlp(decay: float = 0.01, scale: float = 1.0) -> Net:
    torch.manual_seed(1)
    widths = [4, 5, 3, 4]
    pieces = [nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in pairwise(widths)]
    return Net([*pieces, nn.Linear(4, 3)], torch.randn(B, 4, dtype=torch.float64), decay, scale)


def convnet() -> Net:
    torch.manual_seed(2)
    pieces = [
        nn.Sequential(nn.Conv2d(2, 2, 3, stride=2, padding=1), nn.Tanh()),
        nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten()),
        nn.Sequential(nn.LayerNorm(8), nn.GELU()),
        nn.Linear(8, 3, bias=False),
    ]
    return Net(pieces, torch.randn(B, 2, 4, 4, dtype=torch.float64))


def token_net() -> Net:
    torch.manual_seed(3)
    pieces = [nn.Embedding(6, 3), nn.Linear(3, 2), nn.Sequential(nn.Flatten(), nn.Tanh()), nn.Linear(4, 3)]
    return Net(pieces, torch.randint(6, (B, 2)))


NETS = {"mlp": mlp, "convolution and norms": convnet, "embedding": token_net}


def group_columns(net: Net, rank: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """D_k, G_k by plain backpropagation of the masked adjoints, and the sizes of the groups."""
    X = [net.X0.clone().requires_grad_(net.X0.is_floating_point())]
    thetas = [theta.clone().requires_grad_() for theta in net.thetas]
    for f, theta in zip(net.layers, thetas, strict=True):
        X.append(f(X[-1], theta))
    group = [i * rank // B for i in range(B)]
    sizes = torch.tensor([group.count(g) for g in range(rank)], dtype=torch.float64)
    moving = X if X[0].requires_grad else X[1:]
    leaves = [*moving, *thetas]
    columns = []
    (adjoint,) = torch.autograd.grad(loss(X[-1]), X[-1], retain_graph=True)
    for g in range(rank):
        masked = torch.stack([a if group[i] == g else 0 * a for i, a in enumerate(adjoint)])
        columns.append(torch.autograd.grad(X[-1], leaves, masked, retain_graph=True, materialize_grads=True))
    stacked = [torch.stack([c.flatten() for c in column], 1) for column in zip(*columns, strict=True)]
    return stacked[: len(moving)], stacked[len(moving) :], sizes


# The value is the minimum over all later layers of one joint quadratic model.


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", NETS)
def test_value_is_the_schur_complement_of_the_joint_problem(name: str, rank: int) -> None:
    net = NETS[name]()
    s = net.solve(rank)
    Vx, Vxx = grouped_cost(loss, rank, BETA)(s.X[-1])
    for k in range(len(net.layers)):
        sizes = [len(theta) for theta in net.thetas[k:]]

        def tail(x: Tensor, theta: Tensor, k: int = k, sizes: list[int] = sizes) -> Tensor:
            return states(net.layers[k:], theta.split(sizes), x)[-1].flatten()

        theta = torch.cat(net.thetas[k:])
        Ju = torch.autograd.functional.jacobian(lambda t, k=k: tail(s.X[k], t), theta)
        H = Ju.T @ Vxx @ Ju + torch.block_diag(*net.metric[k:])
        g = Ju.T @ Vx + torch.cat(net.linear_cost[k:])
        if s.X[k].is_floating_point():
            Jx = torch.autograd.functional.jacobian(lambda x, t=theta: tail(x, t), s.X[k]).flatten(1)
            cross = Jx.T @ Vxx @ Ju
            assert_close(s.Vx[k], Jx.T @ Vx - cross @ torch.linalg.solve(H, g))
            assert_close(s.Vxx[k], Jx.T @ Vxx @ Jx - cross @ torch.linalg.solve(H, cross.T))
        else:
            assert s.Vx[k].shape == (0,)
            assert s.Vxx[k].shape == (0, 0)
        # The first layer of the tail, with the others gone, is the open-loop gain of layer k.
        assert_close(s.k[k], -torch.linalg.solve(H, g)[: sizes[0]])


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", NETS)
def test_linear_rollout_is_the_whole_network_gauss_newton_step(name: str, rank: int) -> None:
    net = NETS[name]()
    terminal = grouped_cost(loss, rank, BETA)
    s = net.solve(rank, rollout="linear")
    step = gauss_newton_step(net.layers, net.thetas, net.X0, terminal, net.metric, net.linear_cost)
    _, G, sizes = group_columns(net, rank)
    stacked = torch.cat(G)
    H = stacked @ torch.diag(BETA**2 * B / sizes) @ stacked.T + torch.block_diag(*net.metric)
    dense = -torch.linalg.solve(H, stacked.sum(1) + torch.cat(net.linear_cost))
    assert_close(torch.cat(step), dense)
    assert_close(torch.cat(s.dtheta), dense)


# The closed form: every quantity in the span of D_k, with r x r matrices only.


@pytest.mark.parametrize("rollout", ["linear", "nonlinear"])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rank", RANKS)
def test_closed_form_of_consistent_mode(rank: int, decay: float, rollout: str) -> None:
    net = mlp(decay)
    s = net.solve(rank, rollout=rollout)
    D, G, sizes = group_columns(net, rank)
    J, b = torch.diag(sizes / (BETA**2 * B)), sizes / (BETA**2 * B)
    Js, bs, Ks, us = [J], [b], [], []
    for k in reversed(range(len(net.layers))):
        Ks.insert(0, G[k].T @ torch.linalg.solve(net.metric[k], G[k]))
        us.insert(0, G[k].T @ torch.linalg.solve(net.metric[k], net.linear_cost[k]))
        J, b = J + Ks[0], b - us[0]
        Js.insert(0, J)
        bs.insert(0, b)
    for k in range(len(net.layers) + 1):
        assert_close(s.Vx[k], D[k] @ torch.linalg.solve(Js[k], bs[k]))
        assert_close(s.Vxx[k], D[k] @ torch.linalg.solve(Js[k], D[k].T))
    change, x, ws = torch.zeros(rank, dtype=torch.float64), net.X0, []
    for k in range(len(net.layers)):
        ws.append(torch.linalg.solve(Js[k], bs[k] + change))
        step = -torch.linalg.solve(net.metric[k], G[k] @ ws[k] + net.linear_cost[k])
        assert_close(s.dtheta[k], step)
        if rollout == "linear":
            change = change - Ks[k] @ ws[k] - us[k]
            assert_close(ws[k], ws[0])
        else:
            x = net.layers[k](x, net.thetas[k] + step)
            change = D[k + 1].T @ (x - s.X[k + 1]).flatten()
        assert_close(D[k + 1].T @ s.dx[k + 1], change)


def paper_closed_form(net: Net, rank: int, eta: float) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[int]]:
    """a_k, Sigma_k, the steps of a linear rollout and the projections, in r x r form."""
    _, G, sizes = group_columns(net, rank)
    a, Sigma = torch.ones(rank, dtype=torch.float64), torch.diag(BETA**2 * B / sizes)
    values, Sigmas, counts, Ks, us = [a], [Sigma], [], [], []
    for k in reversed(range(len(net.layers))):
        Ks.insert(0, G[k].T @ torch.linalg.solve(net.metric[k], G[k]))
        us.insert(0, G[k].T @ torch.linalg.solve(net.metric[k], net.linear_cost[k]))
        # eigh, not Cholesky: after a projection Sigma is singular.
        variance, basis = torch.linalg.eigh(Sigma)
        L = basis * variance.clamp(min=0).sqrt()
        lam, U = torch.linalg.eigh(L.T @ Ks[0] @ L)
        cut = torch.where(lam > 1, 1 / lam, torch.ones_like(lam))
        a = a - L @ U @ (cut * (U.T @ L.T @ (Ks[0] @ a + us[0])))
        Sigma = L @ U @ torch.diag(torch.where(lam > 1, torch.zeros_like(lam), 1 - lam)) @ U.T @ L.T
        values.insert(0, a)
        Sigmas.insert(0, Sigma)
        counts.insert(0, int((lam > 1).sum()))
    change, steps = torch.zeros(rank, dtype=torch.float64), []
    for k in range(len(net.layers)):
        w = values[k + 1] + Sigmas[k + 1] @ change
        steps.append(-eta * torch.linalg.solve(net.metric[k], G[k] @ w + net.linear_cost[k]))
        change = change - eta * (Ks[k] @ w + us[k])
    return values, Sigmas, steps, counts


@pytest.mark.parametrize(("scale", "projects"), [(1.0, False), (3e-4, True)])
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("rank", RANKS)
def test_closed_form_of_paper_mode(rank: int, decay: float, scale: float, projects: bool) -> None:
    net, eta = mlp(decay), 0.3
    net.metric[1] = scale * net.metric[1]  # small in the middle, so that projected values travel on
    net.metric[3] = scale**0.5 * net.metric[3]
    s = net.solve(rank, mode="paper", rollout="linear", step=eta)
    D, _, _ = group_columns(net, rank)
    a, Sigma, steps, counts = paper_closed_form(net, rank, eta)
    assert s.projections == counts
    assert (sum(counts) > 0) == projects
    for k in range(len(net.layers) + 1):
        assert_close(s.Vx[k], D[k] @ a[k], scale=D[k].abs().max())
        assert_close(s.Vxx[k], D[k] @ Sigma[k] @ D[k].T, scale=D[k].square().max())
        assert torch.linalg.eigvalsh(s.Vxx[k]).min() >= -1e-15
    for k, step in enumerate(steps):
        assert_close(s.dtheta[k], step, scale=steps[-1].abs().max())


@pytest.mark.parametrize("rank", RANKS)
def test_paper_mode_without_projection_is_the_bellman_update(rank: int) -> None:
    net = mlp()
    s = net.solve(rank, mode="paper")
    assert s.projections == [0] * len(net.layers)
    for k, C in enumerate(net.metric):
        assert torch.equal(s.Quu[k], C)
        assert_close(s.Vx[k], s.Qx[k] - s.Qxu[k] @ torch.linalg.solve(C, s.Qu[k]))
        assert_close(s.Vxx[k], s.Qxx[k] - s.Qxu[k] @ torch.linalg.solve(C, s.Qxu[k].T))


def test_metric_rule_sees_the_value_of_the_later_layers() -> None:
    net, seen = mlp(), {}

    def rule(k: int, Qu: Tensor, Vx: Tensor) -> Tensor:
        seen[k] = (Qu, Vx)
        return net.metric[k] + torch.diag(Qu**2)

    s = net.solve(3, mode="paper", metric=rule)
    assert list(seen) == [3, 2, 1, 0]
    for k, (Qu, Vx) in seen.items():
        assert Vx.shape == s.X[k + 1].shape
        assert torch.equal(Vx.flatten(), s.Vx[k + 1])
        assert torch.equal(Qu, s.Qu[k])
        assert_close(Qu, s.fu[k].T @ s.Vx[k + 1] + net.linear_cost[k])
        assert torch.equal(s.Quu[k], net.metric[k] + torch.diag(Qu**2))


# Rollouts.


@pytest.mark.parametrize("mode", ["consistent", "paper"])
def test_nonlinear_rollout_runs_the_updated_network(mode: str) -> None:
    net = mlp()
    s = net.solve(3, mode=mode, fraction=0.4, step=0.5)
    x = net.X0
    for k, f in enumerate(net.layers):
        assert_close(s.dtheta[k], 0.4 * 0.5 * (s.k[k] + s.K[k] @ s.dx[k]))
        x = f(x, net.thetas[k] + s.dtheta[k])
        assert_close(s.dx[k + 1], (x - s.X[k + 1]).flatten())
    assert s.dx[0].shape == (net.X0.numel(),)
    assert not s.dx[0].any()


def test_linear_rollout_plans_the_full_step_and_takes_the_fraction() -> None:
    net = mlp()
    fractions = [0.1, 0.5, torch.linspace(0, 1, len(net.thetas[2]), dtype=torch.float64), 1.0]
    full = net.solve(3, rollout="linear")
    part = net.solve(3, rollout="linear", fraction=fractions)
    for k, fraction in enumerate(fractions):
        assert_close(part.dtheta[k], fraction * full.dtheta[k])
        assert_close(part.dx[k + 1], full.dx[k + 1])


def test_rollouts_agree_to_first_order() -> None:
    gaps = []
    for scale in (1e3, 1e4):
        net = mlp(scale=scale)
        gaps.append((net.solve(3).dx[-1] - net.solve(3, rollout="linear").dx[-1]).norm())
    assert 0 < gaps[1] < 0.02 * gaps[0]  # a tenth of the step, a hundredth of the gap


# Terminal cost and modules.


def test_groups_are_contiguous_rows_of_the_batch() -> None:
    X = torch.randn(B, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    d = torch.softmax(X, 1)
    d[range(B), TARGETS] -= 1
    d = d / B
    Vx, Vxx = grouped_cost(loss, 3, BETA)(X)
    assert_close(Vx, d.flatten())
    expected = torch.zeros(15, 15, dtype=torch.float64)
    for rows in ([0, 1], [2, 3], [4]):
        y = torch.zeros_like(d)
        y[rows] = d[rows]
        expected += BETA**2 * B / len(rows) * torch.outer(y.flatten(), y.flatten())
    assert_close(Vxx, expected)
    assert_close(grouped_cost(loss, 1, BETA)(X)[1], BETA**2 * torch.outer(d.flatten(), d.flatten()))
    full = BETA**2 * B * torch.block_diag(*(torch.outer(row, row) for row in d))
    assert_close(grouped_cost(loss, B, BETA)(X)[1], full)
    assert torch.equal(grouped_cost(loss, B + 7, BETA)(X)[1], grouped_cost(loss, B, BETA)(X)[1])


def test_stage_is_the_module_in_float64() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.LayerNorm(2))
    module[0].bias.requires_grad_(False)
    f, theta = stage(module)
    trainable = [p for p in module.parameters() if p.requires_grad]
    assert theta.dtype == torch.float64
    assert torch.equal(theta, torch.cat([p.detach().flatten() for p in trainable]).double())
    X = torch.randn(B, 3, dtype=torch.float64)
    change = torch.randn_like(theta)
    moved = f(X, theta + change)
    assert module[0].weight.dtype == torch.float32
    module.double()
    nn.utils.vector_to_parameters(theta + change, trainable)
    assert_close(moved, module(X).detach())
    assert_close(f(X, theta + change), moved)  # training the module has not moved the bias that f holds


def test_stage_without_parameters_takes_part() -> None:
    f, theta = stage(nn.Tanh())
    assert theta.shape == (0,)
    with_stage = token_net()
    assert [len(t) for t in with_stage.thetas] == [18, 8, 0, 15]
    s = with_stage.solve(3)
    assert s.dtheta[2].shape == (0,)
    assert_close(s.Vx[2], s.fx[2].T @ s.Vx[3])
    x = torch.randn(2, 3, dtype=torch.float64)
    assert torch.equal(f(x, theta), x.tanh())


# Errors, and the promises about the package.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "exact"}, "mode='exact'"),
        ({"rollout": "none"}, "rollout='none'"),
        ({"rank": 0}, "rank must be at least 1, got 0"),
        (
            {"metric": [torch.eye(2, dtype=torch.float64)] * 4},
            "metric of layer 3 must be a symmetric 15 x 15 matrix",
        ),
        (
            {"metric": [torch.ones(n, n).double().triu() for n in (25, 18, 16, 15)]},
            "metric of layer 3 must be a sym",
        ),
        ({"metric": [-torch.eye(n).double() for n in (25, 18, 16, 15)]}, "metric of layer 3 is too small"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mlp().solve(**options)


def test_float32_parameters_are_refused() -> None:
    net = mlp()
    net.thetas[1] = net.thetas[1].float()
    with pytest.raises(ValueError, match="thetas must be float64"):
        net.solve()


def test_reference_stands_alone_and_stays_short() -> None:
    folder = Path(ocnopt.reference.ddp.__file__).parent
    sources = [path.read_text() for path in sorted(folder.glob("*.py"))]
    assert all(len(source.splitlines()) <= 200 for source in sources)  # the discrete solver, and that of Neural ODEs
    imported = set()
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    standard = {"__future__", "copy", "collections.abc", "dataclasses"}
    assert imported <= standard | {"torch", "torch.func", "ocnopt.reference.ddp"}

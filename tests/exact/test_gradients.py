"""Where the group gradients are not simply those of the samples, and in which form they are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exact.columns import Policy, sizes, spread
from tests.exact.compare import PLAIN, assert_close, assert_same_step, engine_step, optimizer, stagewise
from tests.exact.dense import Dense, Expected
from tests.exact.nets import CLASSES, NETS, B, Batch, Net, Scale, make, real, seeded
from torch import Tensor, nn

import ocnopt.gradients
import ocnopt.multi
from ocnopt.forms import Forms
from ocnopt.gradients import Explicit, GroupGradients
from ocnopt.gram import Gram
from ocnopt.layers import Adapter
from ocnopt.players import Player

BETA = PLAIN["gauss_newton"]


def tamper(net: Net) -> Callable[[], None]:
    """What people do between backward and step: clip, and add a penalty to some of the gradients."""

    def between() -> None:
        nn.utils.clip_grad_norm_(net.model.parameters(), 0.3)
        first = next(net.model.parameters())
        assert first.grad is not None
        first.grad += 0.05 * first.detach()

    return between


def gradients(net: Net) -> list[Tensor]:
    named = {n: p.grad for n, p in net.model.named_parameters() if p.grad is not None}
    return stagewise(net, named)


def expected_steps(dense: Dense, e: Expected, policy: Policy, thetas: list[Tensor]) -> list[Tensor]:
    if dense.game["feedback"] == "linear":
        return policy.linear_rollout()

    def change(steps: list[Tensor]) -> Tensor:
        x = e.solution.X[0]
        for f, theta, step in zip(dense.layers, thetas, steps, strict=False):
            x = f(x, theta + step)
        return e.D[len(steps)].T @ (x - e.solution.X[len(steps)]).flatten()

    return policy.nonlinear_rollout(change)


def check_columns(net: Net, opt: Any, modify: Callable[[int, Tensor, Tensor], Tensor], **step: Any) -> Policy:
    """One step (no momentum) with columns ``modify(k, G_k, gradient)`` in place of the true ones."""
    dense = Dense(net, opt)
    thetas = list(dense.thetas)
    actual = stagewise(net, engine_step(net.model, opt, net.batches[0], **step))
    e, o = dense.step(net.batches[0]), dense.game
    grads = gradients(net)
    G = [modify(k, G, g) for k, (G, g) in enumerate(zip(e.G, grads, strict=True))]
    cost = [o["weight_decay"] * theta for theta in thetas]
    C = [torch.ones_like(l) for l in cost]
    if o["curvature"] == "adaptive":  # the first step of a corrected average: the gradient itself
        C = [(g + l).abs() + o["eps"] for g, l in zip(grads, cost, strict=True)]
    policy = Policy(G, [torch.diag(c) / o["lr"] for c in C], cost, BETA)
    e.dtheta = expected_steps(dense, e, policy, thetas)
    assert_same_step(dense, actual, e)
    for k, (a, Sigma) in enumerate(zip(policy.a, policy.Sigma, strict=True)):
        value = opt.diagnostics.policy.value(k)
        assert_close(value[0], a, f"a of stage {k}")
        assert_close(value[1], Sigma, f"Σ of stage {k}")
    return policy


@pytest.mark.parametrize("feedback", ["nonlinear", "linear"])
@pytest.mark.parametrize(("curvature", "lr"), [("identity", 0.8), ("adaptive", 0.1)])
@pytest.mark.parametrize("rank", [1, 3, "full"])
@pytest.mark.parametrize("name", ["mlp", "convolution"])
def test_what_happens_to_the_gradients_before_the_step_counts(
    name: str, rank: int | str, curvature: str, lr: float, feedback: str
) -> None:
    net = make(name)
    options = {"curvature": curvature, "lr": lr, "eps": 1e-2, "weight_decay": 0.01}
    opt = optimizer(net, feedback=feedback, rank=rank, **options)
    check_columns(net, opt, lambda k, G, g: spread(G, g), between=tamper(net))


@pytest.mark.parametrize("feedback", ["nonlinear", "linear"])
@pytest.mark.parametrize(("curvature", "lr"), [("identity", 0.8), ("adaptive", 0.1)])
def test_parameters_without_an_adapter_share_their_gradient(curvature: str, lr: float, feedback: str) -> None:
    with seeded(2):
        first = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        net = Net([first, nn.Sequential(Scale(5), nn.Tanh()), nn.Linear(5, CLASSES)], real(4))
    opt = optimizer(net, feedback=feedback, rank=3, curvature=curvature, lr=lr, eps=1e-2, weight_decay=0.01)
    shares = sizes(3) / B
    with pytest.warns(UserWarning, match=r"1\.0\.scale: no adapter is registered for Scale"):
        policy = check_columns(net, opt, lambda k, G, g: torch.outer(g, shares) if k == 1 else G)
    grad = policy.G[1].sum(1)
    kappa = grad @ torch.linalg.solve(policy.M[1], grad)
    assert_close(opt.diagnostics.kernels.K[1], kappa * torch.outer(shares, shares), "K of the layer without an adapter")


# --- Gram and explicit form ---


def adapters(kind: type[Adapter] = Adapter) -> list[type[Adapter]]:
    return [kind, *(c for child in kind.__subclasses__() for c in adapters(child))]


class Forced:
    """Makes every layer take one form, and tells which forms were taken."""

    def __init__(self, gram: bool) -> None:
        self.gram, self.seen = gram, set[type[GroupGradients]]()

    def __enter__(self) -> set[type[GroupGradients]]:
        self.patch = pytest.MonkeyPatch()
        for adapter in adapters():
            if "prefers_gram" in vars(adapter):
                self.patch.setattr(adapter, "prefers_gram", lambda *_: self.gram)
        kind = Forms.kind

        def spy(forms: Forms, player: Player) -> type[GroupGradients]:
            self.seen.add(found := kind(forms, player))
            return found

        self.patch.setattr(Forms, "kind", spy)
        return self.seen

    def __exit__(self, *_: object) -> None:
        self.patch.undo()


def run(net: Net, gram: bool, **options: Any) -> tuple[list[dict[str, Tensor]], Tensor, Tensor]:
    """Steps, and J and b of the last one."""
    opt = optimizer(net, curvature="identity", lr=0.8, **options)
    with Forced(gram) as seen:
        steps = [engine_step(net.model, opt, batch, tamper(net)) for batch in net.batches]
    assert seen == {Gram if gram else Explicit}
    return steps, opt.diagnostics.policy.J, opt.diagnostics.policy.b


def assert_forms_agree(build: Callable[[], Net], **options: Any) -> None:
    (gram, *gram_values), (explicit, *explicit_values) = (run(build(), form, **options) for form in (True, False))
    for t, (actual, expected) in enumerate(zip(gram, explicit, strict=True)):
        for name in expected:
            assert_close(actual[name], expected[name], f"δθ of {name} at step {t}")
    for actual, expected in zip(gram_values, explicit_values, strict=True):
        assert_close(actual, expected, "J or b")


@pytest.mark.parametrize("feedback", ["nonlinear", "linear"])
@pytest.mark.parametrize("rank", [3, "full"])
@pytest.mark.parametrize("name", NETS)
def test_gram_and_explicit_form_are_the_same_step(name: str, rank: int | str, feedback: str) -> None:
    momentum = {"momentum": 0.6, "ema": False, "weight_decay": 0.01}
    assert_forms_agree(lambda: make(name), feedback=feedback, rank=rank, **momentum)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    batch=st.integers(2, 6),
    size=st.integers(3, 6),
    blocks=st.integers(1, 2),
    channels=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 1),
    rank=st.integers(2, 7),
)
def test_forms_agree_whatever_the_shapes(
    batch: int, size: int, blocks: int, channels: tuple[int, int], kernel: int, stride: int, padding: int, rank: int
) -> None:
    def build() -> Net:
        with seeded(3):
            c = [n * blocks for n in channels]
            conv = nn.Conv2d(*c, kernel, stride=stride, padding=padding, groups=blocks)
            pixels = ((size + 2 * padding - kernel) // stride + 1) ** 2
            data: list[Batch] = [
                (torch.randn(batch, c[0], size, size, dtype=torch.float64), torch.randint(CLASSES, (batch,)))
                for _ in range(2)
            ]
            pieces = [nn.Sequential(conv, nn.Tanh(), nn.Flatten()), nn.Linear(c[1] * pixels, CLASSES)]
            return Net(pieces, data)

    assert_forms_agree(build, rank=rank, momentum=0.6, weight_decay=0.01)


# --- many parameters in one product ---


def columns(shapes: list[tuple[int, ...]], rank: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(rank, *shape, generator=g, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("rank", [1, 3])
def test_short_gradients_side_by_side(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One batched product for all of them, as on a GPU; the long one by itself."""
    shapes = [(4,), (2, 3), (), (7,), (5, 2)]
    fractions = torch.arange(1.0, rank + 1, dtype=torch.float64) / sum(range(rank + 1))
    alone = Explicit(columns(shapes, rank), fractions)
    other = Explicit([2 * G.flip(0) + 1 for G in alone.columns], fractions)
    vectors, starts = ([G[0] for G in columns(shapes, 2)] for _ in range(2))
    steered = [([1, 3], fractions), ([0, 4], 2 - fractions), ([2], fractions**2)]

    def answers() -> list[Tensor]:
        tensors = [t.clone() for t in starts]
        alone.add_each(tensors, steered, 0.7)
        return [alone.kernels(other), alone.project(vectors), *tensors]

    expected = answers()
    for i, G in enumerate(alone.columns):
        flat, theirs = G.reshape(rank, -1), other.columns[i].reshape(rank, -1)
        assert_close(expected[0][i], flat @ theirs.T, f"K of {i}")
        assert_close(expected[1][i], flat @ vectors[i].reshape(-1), f"u of {i}")
    weights = {i: w for index, w in steered for i in index}
    for i, G in enumerate(alone.columns):
        assert_close(expected[2 + i], starts[i] + 0.7 * torch.tensordot(weights[i], G, 1), f"sum of {i}")
    monkeypatch.setattr(ocnopt.gradients, "together", lambda rows: [i for i, G in enumerate(rows) if G.shape[1] < 8])
    for found, known in zip(answers(), expected, strict=True):
        assert_close(found, known, "side by side")


@pytest.mark.parametrize("short", [0, 10])
def test_columns_add_up(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side where they are short."""
    monkeypatch.setattr(
        ocnopt.gradients, "together", lambda rows: [i for i, G in enumerate(rows) if G.shape[1] < short]
    )
    shapes, fractions = [(4,), (2, 3), (), (3, 2000), (5,)], torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    found, grads = columns(shapes, 3), [G[0] for G in columns(shapes, 1)]
    G = Explicit.of(found, grads, fractions).columns
    for i in range(5):
        rest = grads[i] - found[i].sum(0)
        assert_close(G[i], found[i] + torch.tensordot(fractions, rest, 0), f"columns of {i}")

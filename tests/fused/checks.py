"""Fused kernels do what the plain operations do. On a GPU, or in Triton's interpreter: see who imports this."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.layers.oracle import adapter_of
from tests.toys import assert_identical, state_of, values
from torch import Tensor, nn

from ocnopt import OCNOpt, readings
from ocnopt.fused import dots, sums, support
from ocnopt.gradients import Explicit, Gram
from ocnopt.groups import Groups
from ocnopt.layers.base import Call

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

MOMENTA = {
    "none": {"momentum": 0.0},
    "average": {"momentum": 0.9},
    "uncorrected": {"momentum": 0.9, "bias_correction": False},
    "heavy ball": {"momentum": 0.8, "ema": False},
    "nesterov": {"momentum": 0.8, "ema": False, "nesterov": True},
}
DECAYS = {
    "none": {},
    "coupled": {"weight_decay": 0.1},
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
}


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Parameters of one number up to two chunks."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 860), nn.Tanh(), nn.Linear(860, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 1))
    return net.to(DEVICE, dtype)


def pair(
    steps: int = 2, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, OCNOpt, nn.Module, OCNOpt]:
    """Two that have come to the same place, one of which goes on by fused kernels."""
    model = network(dtype)
    plain = OCNOpt(model.parameters(), model=model, fused=False, lr=0.03, **options)
    for i in range(steps):
        _one_pass(model, i)
        plain.step()
    ours = copy.deepcopy(model)
    for module in ours.modules():  # the hooks of the other
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    fused = OCNOpt(ours.parameters(), model=ours, lr=0.03, **options)
    if steps:
        fused.load_state_dict(plain.state_dict())
    fused.param_groups[0]["fused"] = True
    return model, plain, ours, fused


def _one_pass(model: nn.Module, seed: int, batch: int = 8) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 5, generator=draw).to(DEVICE, next(model.parameters()).dtype)
    model.zero_grad()
    model(x).float().add(0.3).square().mean().backward()


@contextmanager
def without_kernels() -> Iterator[None]:
    """Not even for sums, which ``fused=False`` leaves as they are."""
    support._broken = "they are not asked for"
    try:
        yield
    finally:
        support._broken = None


def found(model: nn.Module, opt: OCNOpt) -> list[Any]:
    report = opt.diagnostics
    numbers = [] if report.kernels is None else [report.kernels.K, report.kernels.u, report.w, report.s]
    change = [] if report.kernels is None else [report.predicted_change]
    return [values(model), state_of(opt), numbers, change]


def assert_same_step(seed: int = 7, steps: int = 2, **options: Any) -> None:
    model, plain, ours, fused = pair(steps, **options)
    before = values(model)
    with without_kernels():
        _one_pass(model, seed)
        plain.step()
    _one_pass(ours, seed)
    fused.step()
    assert not torch.equal(before[0], values(model)[0])
    # s is a difference of two inner products, each of which is rounded
    torch.testing.assert_close(found(ours, fused), found(model, plain), rtol=2e-5, atol=5e-7)


@pytest.mark.parametrize(
    ("feedback", "momentum", "decay"),
    [
        ("linear", "none", "coupled"),
        ("linear", "average", "none"),
        ("linear", "average", "decoupled"),
        ("linear", "heavy ball", "coupled"),
        ("linear", "nesterov", "decoupled"),
        ("nonlinear", "none", "none"),
        ("nonlinear", "average", "coupled"),
        ("nonlinear", "uncorrected", "decoupled"),
        ("nonlinear", "nesterov", "coupled"),
    ],
)
@pytest.mark.parametrize("curvature", ["identity", "adaptive"])
def test_a_step(curvature: str, feedback: str, momentum: str, decay: str) -> None:
    assert_same_step(curvature=curvature, feedback=feedback, **MOMENTA[momentum], **DECAYS[decay])


@pytest.mark.parametrize(
    "options",
    [
        {"feedback": "off"},
        {"feedback": "off", "curvature": "identity"},
        {"maximize": True},
        {"maximize": True, "feedback": "nonlinear"},
        {"players": 3, "weight_decay": 0.1},
        {"eps": 0.0},
        {"decay": 0.0},
        {"clamp": False},
        {"clamp": False, "feedback": "nonlinear", "gauss_newton": 0.3},
        {"game": "noncooperative", "feedback": "nonlinear"},
        {"game": "noncooperative"},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    assert_same_step(**options)


@pytest.mark.parametrize(
    ("feedback", "momentum", "decay"),
    [
        ("linear", "average", "none"),
        ("linear", "nesterov", "coupled"),
        ("nonlinear", "none", "none"),
        ("nonlinear", "average", "decoupled"),
        ("nonlinear", "heavy ball", "coupled"),
    ],
)
@pytest.mark.parametrize(("curvature", "rank"), [("identity", 3), ("adaptive", 3), ("adaptive", "full")])
def test_a_step_by_group(curvature: str, rank: int | str, feedback: str, momentum: str, decay: str) -> None:
    options = {"curvature": curvature, "rank": rank, "feedback": feedback}
    assert_same_step(**options, **MOMENTA[momentum], **DECAYS[decay])


@pytest.mark.parametrize(
    "options",
    [
        {"maximize": True},
        {"maximize": True, "feedback": "nonlinear"},
        {"players": 3, "weight_decay": 0.1},
        {"clamp": False, "feedback": "nonlinear", "gauss_newton": 0.3},
        {"game": "noncooperative", "feedback": "nonlinear"},
    ],
    ids=str,
)
def test_options_by_group(options: dict[str, Any]) -> None:
    assert_same_step(rank=3, **options)


@pytest.mark.parametrize("curvature", ["identity", "adaptive"])
def test_gradients_that_are_no_sum_of_groups(curvature: str) -> None:
    """What somebody has done to them is shared out."""
    model, plain, ours, fused = pair(rank=3, feedback="nonlinear", curvature=curvature)
    for net, opt in ((model, plain), (ours, fused)):
        _one_pass(net, 7)
        for i, p in enumerate(net.parameters()):
            p.grad.mul_(0.5).add_(0.01 * i)
        opt.step()
    torch.testing.assert_close(found(ours, fused), found(model, plain), rtol=2e-5, atol=5e-7)


def test_a_bad_group_leaves_no_trace() -> None:
    """One that shows in no gradient, since somebody has repaired it."""
    _, _, model, opt = pair(rank=2)
    before = values(model), state_of(opt)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[3] = torch.inf
    model.zero_grad()
    model(x).square().mean().backward()
    for p in model.parameters():
        p.grad.nan_to_num_(0.0, 0.0, 0.0)
    opt.step()
    assert_identical((values(model), state_of(opt)), before)
    with pytest.warns(UserWarning, match=r"1 step\(s\) skipped"):
        assert opt.diagnostics.skipped_steps == 1


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("decoupled", [False, True])
def test_lines(rank: int, decoupled: bool) -> None:
    """Of the policy: in one kernel, or in operations of torch."""
    options = {"weight_decay": 0.1, "decoupled_weight_decay": decoupled, "players": 2}
    _, _, model, opt = pair(steps=1, rank=rank, feedback="nonlinear", **options)
    opt.param_groups[0]["lr"] = torch.tensor(0.02, device=DEVICE) if decoupled else 0.02
    _one_pass(model, 5, batch=19)
    opt.step()
    policy = opt.diagnostics.policy
    J, b = policy.J.double(), policy.b.double()
    starts, slopes = (torch.stack(each).double() for each in policy._lines)
    assert policy.kernels.lines(policy.precision) is not None
    torch.testing.assert_close(slopes, torch.linalg.inv(J), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(starts, torch.linalg.solve(J, b), rtol=1e-4, atol=1e-6)


def test_lines_of_what_is_not_positive_definite() -> None:
    _, _, model, opt = pair(steps=1, rank=3, feedback="nonlinear")
    _one_pass(model, 5)
    opt.step()
    kernels, precision = opt.diagnostics.policy.kernels, opt.diagnostics.policy.precision
    starts, slopes = kernels.lines(-1e6 * precision)
    assert starts.isnan().all()
    assert slopes.isnan().all()


@pytest.mark.parametrize("curvature", ["identity", "adaptive"])
def test_the_first_step(curvature: str) -> None:
    assert_same_step(steps=0, curvature=curvature)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_few_digits(dtype: torch.dtype) -> None:
    model, plain, ours, fused = pair(dtype=dtype, weight_decay=0.1, feedback="nonlinear")
    for net, opt in ((model, plain), (ours, fused)):
        _one_pass(net, 7)
        opt.step()
    assert {t.dtype for own in state_of(fused) for t in own.values()} == {torch.float32}
    torch.testing.assert_close(values(ours), values(model), rtol=0.02, atol=1e-3)
    if DEVICE.type == "cuda" or dtype == torch.float16:  # the interpreter cuts bfloat16 off, a GPU rounds
        same = [(a == b).float().mean() for a, b in zip(values(ours), values(model), strict=True)]
        assert min(same) > 0.9  # but for a last digit here and there


def test_rates_by_group_and_on_the_device() -> None:
    models = [network(), network()]
    optimizers = []
    for model, fused in zip(models, (False, True), strict=True):
        first, *rest = model.parameters()
        groups = [{"params": [first], "lr": torch.tensor(0.02, device=DEVICE)}, {"params": rest, "weight_decay": 0.1}]
        optimizers.append(OCNOpt(groups, lr=0.05, fused=fused))
    for i in range(2):
        for model, opt in zip(models, optimizers, strict=True):
            _one_pass(model, i)
            opt.step()
            opt.param_groups[0]["lr"].mul_(0.5)
    torch.testing.assert_close(values(models[1]), values(models[0]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"feedback": "nonlinear"}, {"weight_decay": 0.1, "feedback": "nonlinear"}])
def test_a_bad_step_leaves_no_trace(options: dict[str, Any]) -> None:
    _, _, model, opt = pair(**options)
    before = values(model), state_of(opt)
    _one_pass(model, 3)
    for p in list(model.parameters())[:2]:
        p.grad[0] = torch.nan
    opt.step()
    assert_identical((values(model), state_of(opt)), before)
    with pytest.warns(UserWarning, match=r"1 step\(s\) skipped: the gradient of '0.weight'"):
        assert opt.diagnostics.skipped_steps == 1
    assert opt.diagnostics.kernels is not None
    assert opt.diagnostics.kernels.K.abs().max() == 0


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"curvature": "identity"}])
def test_a_second_pass_that_fails_leaves_no_trace(options: dict[str, Any]) -> None:
    _, _, model, opt = pair(feedback="nonlinear", **options)
    before = values(model), state_of(opt)
    _one_pass(model, 3)
    model[3].forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        opt.step()
    assert_identical((values(model), state_of(opt)), before)


def test_a_second_moment_that_starts_late() -> None:
    model, plain, ours, fused = pair(curvature="identity")
    fused.param_groups[0]["fused"] = None
    for opt in (plain, fused):
        opt.param_groups[0]["curvature"] = "adaptive"
    for i in range(2):
        for net, opt in ((model, plain), (ours, fused)):
            _one_pass(net, i)
            opt.step()
    torch.testing.assert_close(found(ours, fused), found(model, plain), rtol=1e-4, atol=1e-6)


def _turned(p: nn.Parameter) -> None:
    p.grad = p.grad.T.contiguous().T


def test_gradients_in_another_order() -> None:
    model, plain, ours, fused = pair()
    fused.param_groups[0]["fused"] = None
    for net, opt in ((model, plain), (ours, fused)):
        _one_pass(net, 7)
        _turned(net[0].weight)
        opt.step()
    torch.testing.assert_close(values(ours), values(model), rtol=1e-6, atol=1e-8)
    fused.param_groups[0]["fused"] = True
    _one_pass(ours, 8)
    _turned(ours[0].weight)
    with pytest.raises(
        RuntimeError, match=r"^fused=True cannot be had for '0.weight': gradients or state are not laid out"
    ):
        fused.step()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rank": "full"}, "rank must be 8 or less"),
        ({"bellman": "paper"}, "bellman must be 'consistent'"),
        ({"curvature": "kronecker"}, "curvature must be 'identity' or 'adaptive'"),
    ],
    ids=str,
)
def test_what_cannot_be_had_is_said(options: dict[str, Any], why: str) -> None:
    model = network()
    opt = OCNOpt(model.parameters(), model=model, fused=True, **options)
    _one_pass(model, 0, batch=17)
    with pytest.raises(RuntimeError, match=rf"^fused=True cannot be had for '\S+': {why}"):
        opt.step()
    wide = network(torch.float64)
    opt = OCNOpt(wide.parameters(), fused=True)
    _one_pass(wide, 0)
    with pytest.raises(RuntimeError, match=r"parameters of torch.float64 are not supported"):
        opt.step()


@pytest.fixture
def repaired() -> Iterator[None]:
    yield
    support._broken = None


@pytest.mark.usefixtures("repaired")
def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, ours, fused = pair()
    fused.param_groups[0]["fused"] = None

    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            raise OSError("no compiler")

    monkeypatch.setattr(support.kernels(), "look", Broken())
    for net, opt in ((model, plain), (ours, fused)):
        _one_pass(net, 7)
        if opt is fused:
            with pytest.warns(
                UserWarning, match=r"without fused kernels, and slower: Triton failed \(OSError: no compiler"
            ):
                opt.step()
        else:
            opt.step()
    assert_identical(values(ours), values(model))
    _one_pass(ours, 8)
    fused.step()  # it has been said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 1000, 4096, 13_000])
def test_inner_products(size: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(size, generator=draw).to(DEVICE, dtype) for _ in range(2))
    less = torch.tensor(0.7, device=DEVICE)
    expected = torch.dot(x.double(), y.double())
    for _ in range(2):  # nothing of the first is left for the second
        whole = dots.dot(x, y)
        torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(dots.dot(x, y, less), whole - less, rtol=1e-6, atol=1e-6)
    assert torch.equal(dots.dot(x, y, whole), torch.zeros((), device=DEVICE))  # the same numbers in the same order
    assert dots.dot(x.double(), y.double()) is None


@pytest.mark.parametrize("shape", [(7, 3, 5), (5, 9000), (130, 1)])
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_changes_by_group(rank: int, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=draw).to(DEVICE) for _ in range(2))
    groups = None if rank == 1 else Groups(len(x), rank)
    each = (x.double() * y.double()).flatten(1).sum(1) - 0.3
    before = torch.full((len(x),), 0.3, device=DEVICE) if groups else torch.tensor(0.3 * len(x), device=DEVICE)
    expected = each.sum(0, keepdim=True) if groups is None else groups.sum(each)
    plus = torch.randn(rank, generator=draw).to(DEVICE)
    for _ in range(2):
        found = dots.changes(x, y, before, groups)
        torch.testing.assert_close(found.double(), torch.stack([expected, expected]), rtol=1e-5, atol=1e-4)
        found = dots.changes(x, y, before, groups, torch.tensor(0.5, device=DEVICE), -1.0, plus)
        scaled = -0.5 * expected
        torch.testing.assert_close(found.double(), torch.stack([scaled, scaled + plus]), rtol=1e-5, atol=1e-4)
    assert dots.changes(x, y.double(), before, groups) is None
    assert dots.changes(x, torch.ones((), device=DEVICE).expand_as(x), before, groups) is None


def test_more_groups_than_a_program_has_room_for() -> None:
    x = torch.randn(2048, 1, device=DEVICE)
    for rank in (9, 2048):
        assert dots.changes(x, x, torch.zeros(2048, device=DEVICE), Groups(2048, rank)) is None
    assert support._broken is None


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, Explicit), ({"fused": False}, Gram), ({"bellman": "paper"}, Gram), ({"curvature": "adaptive"}, Explicit)],
    ids=str,
)
@pytest.mark.parametrize("feedback", ["linear", "nonlinear"])
def test_group_gradients_are_formed_where_somebody_reads_them(
    options: dict[str, Any], kind: type, feedback: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 70, bias=False), nn.Tanh(), nn.Linear(70, 70, bias=False)).to(DEVICE)
    opt = OCNOpt(model.parameters(), model=model, rank=4, feedback=feedback, **{"curvature": "identity", **options})
    _one_pass(model, 0)
    opt.step()
    assert {shelf.kind for shelf in opt._roster.shelves._shelves} == {kind}


def test_groups_of_a_convolution_with_channels_last() -> None:
    found = []
    for fused in (False, True):
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 3 * 2, 2)
        model = nn.Sequential(*layers).to(DEVICE, memory_format=torch.channels_last)
        opt = OCNOpt(model.parameters(), model=model, rank=3, fused=fused, lr=0.1)
        x = torch.randn(6, 3, 5, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        for _ in range(2):
            opt.zero_grad()
            model(x.contiguous(memory_format=torch.channels_last)).square().mean().backward()
            opt.step()
        found.append([values(model), opt.diagnostics.w])
    assert not model[0].weight.is_contiguous()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(7, 3), (7, 2, 5), (40, 2, 9, 9)])
@pytest.mark.parametrize("rank", [1, 3, 7])
def test_sums_by_channel(rank: int, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    x, h = (torch.randn(shape, generator=draw).to(DEVICE) for _ in range(2))
    groups, positions = Groups(len(x), rank), range(2, x.dim())
    found = sums.by_channel(x, h, groups)
    expected = groups.sum(x.double() * h.double(), positions), groups.sum(h.double(), positions)
    torch.testing.assert_close([t.double() for t in found], list(expected), rtol=1e-5, atol=1e-5)
    assert sums.by_channel(x.double(), h.double(), groups) is None
    assert sums.by_channel(x, h.transpose(0, 1).contiguous().transpose(0, 1), groups) is None


@pytest.mark.parametrize("shape", [(3, 7), (8, 40, 32), (5, 1), (9, 4), (2, 0)])
def test_totals(shape: tuple[int, ...]) -> None:
    G = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for given in (G, G.double(), G.mT.contiguous().mT):
        torch.testing.assert_close(sums.total(given), given.sum(0))
    (found,) = torch.autograd.grad(sums.total(G.requires_grad_()).sum(), G)
    assert torch.equal(found, torch.ones_like(G))


def test_the_groups_of_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.BatchNorm2d(3).to(DEVICE)
    x, h = torch.randn(2, 8, 3, 4, 5, device=DEVICE).unbind()
    call, adapter, groups = Call(layer, (x,), {}, h), adapter_of(layer), Groups(8, 3)
    found = adapter.group_gradients(call, groups)
    monkeypatch.setattr(sums, "by_channel", lambda *_: None)
    torch.testing.assert_close(found, adapter.group_gradients(call, groups), rtol=1e-5, atol=1e-5)


def test_inner_products_of_what_is_not_contiguous() -> None:
    y = torch.randn(5, device=DEVICE)
    for x in (torch.randn(5, 8, device=DEVICE)[:, 3], torch.full((), 2.0, device=DEVICE).expand(5)):
        torch.testing.assert_close(dots.dot(x, y), torch.dot(x, y))
        torch.testing.assert_close(dots.dot(y, x), torch.dot(x, y))


def _pairs(dtype: torch.dtype) -> list[dots.Pair]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(1,), (3, 5), (4, 3000), (2, 3, 4, 5), (13_000,), (8, 2, 16)]
    rows = [0, 3, 4, 0, 0, 8]
    x, y = ([torch.randn(s, generator=draw).to(DEVICE, dtype) for s in shapes] for _ in range(2))
    for both in (x, y):
        both[3] = both[3].contiguous(memory_format=torch.channels_last)
    return [dots.Pair(*pair) for pair in zip(x, y, rows, strict=True)]


def _each(pairs: list[dots.Pair]) -> list[Tensor]:
    """Their products, pair by pair."""
    found, places = dots.dots(pairs), dots.places(pairs)
    assert len(found) == places[-1] + max(pairs[-1].rows, 1)
    return [found[i : i + pair.rows] if pair.rows else found[i] for pair, i in zip(pairs, places, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_inner_products(dtype: torch.dtype) -> None:
    pairs = _pairs(dtype)
    for pair, found in zip(pairs, _each(pairs), strict=True):
        x, y = (t.double().reshape(pair.rows or 1, -1) for t in (pair.x, pair.y))
        expected = torch.linalg.vecdot(x, y).reshape((pair.rows,) if pair.rows else ())
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


def test_many_inner_products_are_those_of_each() -> None:
    """To the last digit: what is taken off a product may have been formed with others."""
    whole = [pair for pair in _pairs(torch.float32) if not pair.rows]
    for _ in range(2):
        for pair, found in zip(whole, _each(whole), strict=True):
            order = (0, 2, 3, 1)[: pair.x.dim()] if pair.x.dim() == 4 else (0,)
            assert torch.equal(found, dots.dot(*(t.permute(order).reshape(-1) for t in pair[:2])))


def test_which_products_can_be_formed_with_others() -> None:
    x, y = torch.randn(2, 3, 4, 5, device=DEVICE), torch.randn(2, 3, 4, 5, device=DEVICE)
    turned = y.contiguous(memory_format=torch.channels_last)
    assert dots.in_same_order(x, y)
    assert not dots.in_same_order(x, turned)
    assert not dots.in_same_order(x[0], y)
    assert not dots.in_same_order(x, torch.zeros((), device=DEVICE).expand_as(x))
    assert dots.can_wait(x, y.bfloat16())
    assert not dots.can_wait(x, y.double())


@pytest.mark.parametrize("options", [{}, {"rank": 4}, {"curvature": "kronecker"}], ids=str)
@pytest.mark.parametrize("held", [0, 5000, 2**30])
def test_products_that_wait_for_each_other(options: dict[str, Any], held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the end of the backward pass, or up to so many bytes."""
    model, plain, ours, fused = pair(feedback="nonlinear", **options)
    plain.param_groups[0]["fused"] = fused.param_groups[0]["fused"] = None
    monkeypatch.setattr(readings, "_HELD", held)
    for opt, can in ((plain, False), (fused, True)):
        with monkeypatch.context() as without:
            if not can:
                without.setattr(dots, "can_wait", lambda x, y: False)
            for i in range(3):
                _one_pass(model if opt is plain else ours, i)
                assert not opt._tape.waiting._readings  # the backward pass is over
                opt.step()
    assert_close_steps(ours, fused, model, plain)


def assert_close_steps(ours: nn.Module, fused: OCNOpt, model: nn.Module, plain: OCNOpt) -> None:
    torch.testing.assert_close(found(ours, fused), found(model, plain), rtol=1e-4, atol=1e-6)


def test_a_product_that_waits_is_formed_when_it_is_asked_for() -> None:
    """A backward pass that was interrupted leaves some."""
    waiting, kept = readings.Waiting(), []
    e, d = torch.randn(4, 6, device=DEVICE), torch.randn(4, 6, device=DEVICE)
    for batch in (None, 4):
        reading = readings.Reading(e, batch)
        leaf = torch.zeros((), device=DEVICE, requires_grad=True)

        def interrupt(_: Tensor, reading: readings.Reading = reading) -> None:
            reading.arrive(d, last=True, waiting=waiting)
            kept.append(reading._before)
            raise InterruptedError

        leaf.register_hook(interrupt)
        with pytest.raises(InterruptedError):
            leaf.backward()
        expected = (d * e).sum() if batch is None else (d * e).sum(1)
        torch.testing.assert_close(reading.before, expected, rtol=1e-5, atol=1e-5)
        assert not reading.overwritten
        assert reading._tensor is None
    assert kept == [None, None]


def test_what_is_overwritten_while_it_waits() -> None:
    waiting, e = readings.Waiting(), torch.randn(4, 6, device=DEVICE)
    first, second = (readings.Reading(t, None) for t in (e, e.clone()))
    leaf = torch.zeros((), device=DEVICE, requires_grad=True)

    def hook(_: Tensor) -> None:
        for reading in (first, second):
            reading.arrive(torch.ones_like(e), last=True, waiting=waiting)
        e.mul_(2)

    leaf.register_hook(hook)
    leaf.backward()
    assert first.overwritten
    assert not second.overwritten


def test_a_loss_that_is_a_sum() -> None:
    """Its gradient is one number, expanded."""
    found = []
    for fused in (False, True):
        model = network()
        opt = OCNOpt(model.parameters(), model=model, feedback="nonlinear", fused=fused, lr=0.01)
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        model(x).sum().backward()
        opt.step()
        found.append([values(model), opt.diagnostics.s, opt.diagnostics.predicted_change])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_state_of_more_digits() -> None:
    """From a checkpoint of a float64 network: it is not read as something else."""
    wide = network(torch.float64)
    its = OCNOpt(wide.parameters())
    _one_pass(wide, 0)
    its.step()
    model = network()
    opt = OCNOpt(model.parameters())
    opt.load_state_dict(its.state_dict())
    opt.param_groups[0]["fused"] = True
    _one_pass(model, 0)
    with pytest.raises(RuntimeError, match="gradients or state are not laid out as the parameters are"):
        opt.step()


def test_parameters_that_act_apart() -> None:
    """Two layers of one stage with others between them in the order of the parameters."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(torch.tanh(self.one(x))) + self.three(x)

    found = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = Apart().to(DEVICE)
        opt = OCNOpt(model.parameters(), model=model, feedback="nonlinear", fused=fused, curvature="identity", lr=0.3)
        for i in range(2):
            _one_pass(model, i)
            opt.step()
        assert len(opt.game.stages) == 2
        found.append([values(model), opt.diagnostics.s])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)

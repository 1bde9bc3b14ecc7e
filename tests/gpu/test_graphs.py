"""A whole step in one CUDA graph: the same numbers as the lines it stands for, and never old ones."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ocnopt
from ocnopt import whole_step
from ocnopt.curvature import beside
from ocnopt.fused import dots
from ocnopt.lab.models.resnet import resnet18

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

CURVATURES = ("identity", "adaptive", "kronecker")
FEEDBACKS = ("off", "linear", "nonlinear")
STEPS = 14  # beyond the tenth, when a data flow is verified again

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.skip = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.skip(x) + self.b(torch.tanh(self.a(x))))


def chain(dropout: float = 0.0) -> nn.Sequential:
    body = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 16)]
    return nn.Sequential(*body, nn.Tanh(), nn.Dropout(dropout), nn.LayerNorm(16), nn.Linear(16, 3))


def residual() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 12), Block(12), Block(12), nn.Linear(12, 3))


def built(network: Callable[[], nn.Module] = chain, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return network().to("cuda", dtype)


def batches(count: int = STEPS, size: int = 16, dtype: torch.dtype = torch.float64) -> list[Batch]:
    g = torch.Generator().manual_seed(1)
    draw = lambda: (torch.randn(size, 1, 4, 4, generator=g), torch.randint(3, (size,), generator=g))  # noqa: E731
    return [(x.to("cuda", dtype), y.cuda()) for x, y in (draw() for _ in range(count))]


def eager(model: nn.Module, opt: torch.optim.Optimizer, data: Sequence[Batch]) -> list[Tensor]:
    losses = []
    for x, y in data:
        opt.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return losses


class Pair:
    """Two copies of a network: one trained in a plain loop, one by graphs."""

    def __init__(
        self,
        make: Callable[[nn.Module], Any],
        network: Callable[[], nn.Module] = chain,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.plain, self.graphed = built(network, dtype), built(network, dtype)
        self.theirs, self.ours = make(self.plain), make(self.graphed)
        self.step = ocnopt.graphed_step(self.graphed, cross_entropy, self.ours, batches(1, dtype=dtype)[0])
        self.reasons: list[str | None] = []

    def train(self, data: Sequence[Batch], rtol: float = 1e-7, seed: int | None = None) -> None:
        """Both, with the same losses."""
        expected = self._seeded(seed, lambda: eager(self.plain, self.theirs, data))
        found = self._seeded(seed, lambda: [self._step(x, y) for x, y in data])
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-2 * rtol, equal_nan=True)

    def _step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.step(x, y)
        self.reasons.append(self.step.reason)
        return loss

    @staticmethod
    def _seeded(seed: int | None, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        if seed is not None:
            torch.manual_seed(seed)
        return run()

    def compare(self, rtol: float = 1e-7) -> None:
        """Parameters, buffers and the state of the optimizers."""
        assert_same(state_of(self.graphed, self.ours), state_of(self.plain, self.theirs), rtol)


def ocn(**options: Any) -> Callable[[nn.Module], ocnopt.OCNOpt]:
    return lambda model: ocnopt.OCNOpt(model.parameters(), model=model, **options)


def state_of(model: nn.Module, opt: torch.optim.Optimizer) -> dict[str, Any]:
    state = copy.deepcopy(opt.state_dict()["state"])
    return {"model": dict(model.state_dict()), "state": state}


def assert_same(found: Any, expected: Any, rtol: float = 1e-7) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-2 * rtol)


@pytest.mark.parametrize(
    ("curvature", "feedback", "rank", "network"),
    [c for c in product(CURVATURES, FEEDBACKS, (1, 8), (chain, residual)) if c[1] != "off" or c[2] == 1],
)
def test_same_numbers(curvature: str, feedback: str, rank: int, network: Callable[[], nn.Module]) -> None:
    options = {"curvature": curvature, "feedback": feedback, "rank": rank, "refresh_every": 6, "ekfac": False}
    pair = Pair(ocn(**options), network)
    pair.train(batches())
    pair.compare()
    assert pair.ours._count == pair.theirs._count == STEPS
    assert pair.reasons.count(None) >= 8, pair.reasons
    assert pair.step.captures == 1
    found, expected = ([r.w_min for r in opt.diagnostics.layers] for opt in (pair.ours, pair.theirs))
    assert found == pytest.approx(expected)


def test_no_step_is_eager_because_of_a_refresh() -> None:
    pair = Pair(ocn(curvature="kronecker", feedback="nonlinear", refresh_every=6, ekfac=False))
    pair.train(batches(16))
    pair.compare()
    assert pair.reasons[3:] == [None] * 13
    assert all(own["refreshed_at"] > 6 for own in pair.ours.state.values() if "refreshed_at" in own)


def test_bases_are_made_by_a_thread_and_serve_in_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    whole = beside.batched
    name = lambda: threading.current_thread().name  # noqa: E731
    monkeypatch.setattr(beside, "batched", lambda matrices: threads.append(name()) or whole(matrices))
    pair = Pair(ocn(curvature="kronecker", feedback="nonlinear", refresh_every=20, ekfac=False))
    pair.train(batches(60))
    pair.compare()
    assert pair.reasons[3:] == [None] * 57
    assert pair.step.captures == 1
    assert len(threads) >= 2 * 3  # layers, of both
    assert all(each.startswith("ocnopt") for each in threads)
    assert all(own["basis_at"] > 20 for own in pair.ours.state.values() if "basis_at" in own)


def test_a_checkpoint_while_a_thread_is_at_work() -> None:
    """Bit for bit, also in which step the new basis serves."""
    make, data = ocn(curvature="kronecker", refresh_every=60), batches(50)
    model = built(residual)
    opt = make(model)
    eager(model, opt, data[:22])  # one of eight layers: begun after 16 steps, for 6
    assert any("next_input_factor" in own for own in opt.state.values())
    again = built(residual)
    again.load_state_dict(model.state_dict())
    fresh = make(again)
    fresh.load_state_dict(copy.deepcopy(opt.state_dict()))
    for m, o in ((model, opt), (again, fresh)):
        eager(m, o, data[22:])
    torch.testing.assert_close(state_of(again, fresh), state_of(model, opt), rtol=0, atol=0)


@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_eigenvalues_measured_in_the_basis(feedback: str) -> None:
    pair = Pair(ocn(curvature="kronecker", feedback=feedback, refresh_every=6, damping=1e-1))
    pair.train(batches(), 1e-4)
    assert pair.step.reason is None


def test_layers_that_are_looked_at_now_and_then() -> None:
    pair = Pair(ocn(curvature="kronecker", feedback="nonlinear", refresh_every=12, factor_every=3, ekfac=False))
    pair.train(batches(40))
    pair.compare()
    assert pair.step.captures == 2  # with a look and without


@pytest.mark.parametrize("curvature", CURVATURES)
def test_a_checkpoint_goes_on_eagerly(curvature: str) -> None:
    make = ocn(curvature=curvature, feedback="nonlinear", refresh_every=6, ekfac=False)
    pair, data = Pair(make), batches(12)
    pair.train(data[:8])
    again = built()
    again.load_state_dict(pair.graphed.state_dict())
    fresh = make(again)
    fresh.load_state_dict(copy.deepcopy(pair.ours.state_dict()))
    pair.train(data[8:])
    assert pair.step.reason is None
    eager(again, fresh, data[8:])
    assert_same(state_of(again, fresh), state_of(pair.graphed, pair.ours))


def scheduled(kind: str, opt: torch.optim.Optimizer) -> Callable[[int], None]:
    if kind == "by hand":
        return lambda i: opt.param_groups[0].update(lr=0.01 / (1 + i))
    if kind == "lambda":
        schedule: Any = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 1 / (1 + i))
    else:
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=40, cycle_momentum=False)
    return lambda i: schedule.step()


@pytest.mark.parametrize("kind", ["lambda", "one-cycle", "by hand"])
@pytest.mark.parametrize("first", ["schedule", "graph"])
@pytest.mark.filterwarnings("error")
def test_schedules(kind: str, first: str) -> None:
    plain, graphed = built(), built()
    theirs, ours = ocn(lr=0.01)(plain), ocn(lr=0.01)(graphed)
    on = scheduled(kind, ours) if first == "schedule" else None
    step = ocnopt.graphed_step(graphed, cross_entropy, ours, batches(1)[0])
    ours_on, theirs_on = on or scheduled(kind, ours), scheduled(kind, theirs)
    for i, (x, y) in enumerate(batches()):
        assert_same(step(x, y), eager(plain, theirs, [(x, y)])[0])
        ours_on(i)
        theirs_on(i)
    assert (step.reason, step.captures) == (None, 1)


class Overwriting(nn.Module):
    """Is run again on its data flow at each step: of a stream that is overwritten there are no aliases."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.a, self.b, self.head = (nn.Linear(*sizes) for sizes in ((16, 8), (8, 8), (8, 8), (8, 3)))

    def forward(self, x: Tensor) -> Tensor:
        z = 1.0 * torch.tanh(self.into(x.flatten(1)))
        z += self.b(torch.tanh(self.a(1.0 * z)))
        out: Tensor = self.head(z)
        return out


def test_a_data_flow_that_is_run_again() -> None:
    """And waits for nothing, unless it is to be verified."""
    pair = Pair(ocn(feedback="nonlinear"), Overwriting)
    pair.train(batches())
    pair.compare()
    assert pair.step.reason is None


@pytest.mark.parametrize("rank", [1, 4])
def test_inner_products_are_formed_together(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing can be laid out anew, though adjoints may come in another order than before."""
    asked, real = [], dots.dots

    def noted(pairs: Sequence[dots.Pair]) -> Tensor | None:
        found = real(pairs)
        asked.append((whole_step.capturing(), found is not None))
        return found

    monkeypatch.setattr(dots, "dots", noted)
    model = built(lambda: resnet18((1, 16, 16), 3), torch.float32)
    opt = ocnopt.OCNOpt(model.parameters(), model=model, curvature="identity", feedback="nonlinear", rank=rank)
    x, y = torch.randn(16, 1, 16, 16, device="cuda"), torch.randint(3, (16,), device="cuda")
    step = ocnopt.graphed_step(model, cross_entropy, opt, (x, y))
    for _ in range(5):
        step(x, y)
    assert (step.reason, step.captures) == (None, 1)
    assert {each for each in asked if each[0]} == {(True, True)}


@pytest.mark.parametrize(
    ("name", "value"), [("weight_decay", 0.3), ("momentum", 0.5), ("gauss_newton", 2.0), ("feedback", "off")]
)
def test_changed_options_are_never_old(name: str, value: Any) -> None:
    pair, data = Pair(ocn()), batches()
    pair.train(data[:7])
    for opt in (pair.theirs, pair.ours):
        opt.param_groups[0][name] = value
    with pytest.warns(UserWarning, match=f"'{name}' of parameter group 0 changed"):
        pair.train(data[7:])
    pair.compare()
    assert (pair.step.captures, pair.step.reason) == (2, None)


def test_the_mode_of_the_model_is_never_old() -> None:
    pair, data = Pair(ocn(feedback="nonlinear")), batches()
    pair.train(data[:7])
    for model in (pair.plain, pair.graphed):
        model.eval()
    pair.train(data[7:])
    assert pair.step.captures == 2


def test_a_loaded_checkpoint_is_never_old() -> None:
    pair, data = Pair(ocn(curvature="kronecker", refresh_every=20, ekfac=False)), batches()
    everything = (pair.graphed, pair.ours, pair.plain, pair.theirs)
    pair.train(data[:5])
    kept = copy.deepcopy([each.state_dict() for each in everything])
    pair.train(data[5:9])
    for each, state in zip(everything, kept, strict=True):
        each.load_state_dict(state)
    pair.train(data[9:])
    pair.compare()
    assert pair.step.captures == 2


@pytest.mark.parametrize(("curvature", "feedback", "rank"), list(product(CURVATURES, FEEDBACKS, (1, 8))))
def test_bad_batches_are_masked(curvature: str, feedback: str, rank: int) -> None:
    pair, data = Pair(ocn(curvature=curvature, feedback=feedback, rank=rank, ekfac=False), residual), batches(9)
    data[6][0][0] = torch.nan
    pair.train(data)
    pair.compare()
    assert pair.step.reason is None
    assert pair.ours.diagnostics.skipped_steps == 1


def test_other_shapes_run_eagerly() -> None:
    pair = Pair(ocn(feedback="nonlinear", rank=4), residual)
    pair.train([*batches(6), *batches(1, size=5), *batches(12)[6:]])
    pair.compare()
    assert "(5, 1, 4, 4)" in str(pair.reasons[6])
    assert pair.reasons[5] is pair.reasons[7] is pair.reasons[-1] is None
    assert pair.step.captures == 1


@pytest.mark.parametrize("rank", [1, 4])
def test_dropout_draws_as_it_would(rank: int) -> None:
    pair = Pair(ocn(rank=rank), lambda: chain(0.5))
    pair.train(batches(), seed=3)
    assert pair.step.reason is None


def test_dropout_that_must_be_repeated_falls_back() -> None:
    pair = Pair(ocn(feedback="nonlinear"), lambda: chain(0.5))
    pair.train(batches(), seed=3)
    assert "random numbers" in str(pair.step.reason)
    assert pair.step.captures == 0


class Waiting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)


def test_a_model_that_waits_for_the_device_falls_back() -> None:
    pair = Pair(ocn(), lambda: nn.Sequential(nn.Flatten(), Waiting(16, 3)))
    pair.train(batches())
    assert "waits for the device (test_graphs.py, line" in str(pair.step.reason)
    assert pair.step.captures == 0


class Late(nn.Module):
    """Does what no capture allows, and nothing warns of it."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()
        return x


def test_a_failed_capture_leaves_no_trace() -> None:
    body = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), Late(), nn.Dropout(0.2), nn.Linear(8, 3))  # noqa: E731
    pair = Pair(ocn(), body)
    pair.train(batches(), seed=3)
    pair.compare()
    assert "the capture failed" in str(pair.step.reason)
    assert pair.ours._count == STEPS


class Counting(torch.optim.Optimizer):
    """Has a clock in Python, as many do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                own = self.state[p]
                own["step"] = own.get("step", 0) + 1
                p -= group["lr"] * p.grad / own["step"]


def test_an_optimizer_that_counts_in_python_falls_back() -> None:
    pair = Pair(lambda model: Counting(model.parameters()))
    pair.train(batches())
    pair.compare()
    assert "counts in Python ('step' of its state)" in str(pair.step.reason)


CAPTURABLE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, fused=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), capturable=True),
    "fused adamw": lambda m: torch.optim.AdamW(m.parameters(), capturable=True, fused=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), capturable=True),
}


@pytest.mark.parametrize("name", CAPTURABLE)
def test_optimizers_of_torch(name: str) -> None:
    pair = Pair(CAPTURABLE[name])
    pair.train(batches(), 1e-6)
    assert (pair.step.reason, pair.step.captures) == (None, 1)


@pytest.mark.parametrize(("kind", "why"), [(torch.optim.SGD, "fused=True"), (torch.optim.Adam, "capturable=True")])
def test_optimizers_of_torch_that_cannot_be_captured(kind: Any, why: str) -> None:
    pair = Pair(lambda model: kind(model.parameters(), lr=0.01))
    pair.train(batches())
    assert why in str(pair.step.reason)


@pytest.mark.parametrize("feedback", ["linear", "nonlinear"])
def test_autocast(feedback: str) -> None:
    make = ocn(feedback=feedback, curvature="identity")
    pair, data = Pair(make, dtype=torch.float32), batches(dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        found = [pair.step(x, y) for x, y in data]
    expected = []
    for x, y in data:
        pair.theirs.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = cross_entropy(pair.plain(x), y)
        loss.backward()
        pair.theirs.step()
        expected.append(loss.detach())
    assert_same(found, expected, 2e-2)
    assert pair.step.reason is None


def test_gradients_are_those_of_the_last_step() -> None:
    pair = Pair(ocn(curvature="kronecker", refresh_every=6, ekfac=False))
    for batch in batches():
        pair.train([batch])
        assert_same([p.grad for p in pair.graphed.parameters()], [p.grad for p in pair.plain.parameters()])


def test_what_ordinary_steps_give_back_is_not_read_by_graphs() -> None:
    """Workspaces of the matrix library, for one: another capture gives up those of ordinary steps."""
    pair = Pair(ocn(feedback="nonlinear", rank=2))
    pair.train(batches(6))
    other = Pair(ocn(feedback="nonlinear", rank=2))
    other.train(batches(6))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    junk = [torch.full((2**20,), torch.nan, device="cuda") for _ in range(64)]
    pair.train(batches(4))
    assert pair.reasons[-1] is None
    pair.compare()
    assert all(bool(t.isnan().all()) for t in junk)

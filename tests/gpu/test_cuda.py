"""On a CUDA device: the same numbers as on the CPU, and a step that never makes the host wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ocnopt
from ocnopt.curvature import beside

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CURVATURES = ("identity", "adaptive", "kronecker")
FEEDBACKS = ("off", "linear", "nonlinear")


@contextmanager
def no_synchronisation(wanted: bool) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error" if wanted else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 16)]
    return nn.Sequential(*body, nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)).double()


def trained(device: str, steps: int, *, watched: bool = False, bad: int = -1, **options: Any) -> tuple[Tensor, Any]:
    model = network().to(device)
    generator = torch.Generator().manual_seed(1)
    opt = ocnopt.OCNOpt(model.parameters(), model=model, **options)
    batches = [
        (
            torch.randn(10, 1, 4, 4, generator=generator).double().to(device),
            torch.randint(3, (10,), generator=generator).to(device),
        )
        for _ in range(steps)
    ]
    for step, (x, y) in enumerate(batches):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if step == bad:
            next(iter(model.parameters())).grad.fill_(torch.nan)
        with no_synchronisation(watched and step > 1):  # the first steps may build tables and eigenbases
            opt.step()
        opt.zero_grad()
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()]), opt


# Paper mode at a higher rank has nearly singular projections that double rounding errors step by step, and EKFAC's
# eigenvalues depend on the basis chosen inside a null space: neither can agree to rounding between two libraries.
@pytest.mark.parametrize(
    ("curvature", "feedback", "rank", "bellman"),
    [
        c
        for c in product(CURVATURES, FEEDBACKS, (1, 3, "full"), ("consistent", "paper"))
        if c[3] == "consistent" or c[2] == 1
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_cuda_equals_cpu(curvature: str, feedback: str, rank: int | str, bellman: str) -> None:
    options = {"curvature": curvature, "feedback": feedback, "rank": rank, "bellman": bellman, "ekfac": False}
    expected, _ = trained("cpu", 3, **options)
    found, _ = trained("cuda", 3, **options)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("curvature", "feedback", "rank"), list(product(CURVATURES, FEEDBACKS, (1, 3, "full"))))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_does_not_wait_for_the_device(curvature: str, feedback: str, rank: int | str) -> None:
    found, _ = trained("cuda", 4, watched=True, curvature=curvature, feedback=feedback, rank=rank)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize(("curvature", "feedback"), list(product(CURVATURES, FEEDBACKS)))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_bad_step_is_masked_without_waiting(curvature: str, feedback: str) -> None:
    found, opt = trained("cuda", 4, watched=True, bad=2, curvature=curvature, feedback=feedback)
    assert torch.isfinite(found).all()
    with pytest.warns(UserWarning, match="step"):
        assert opt.diagnostics.skipped_steps == 1


def test_autocast_and_dropout_are_repeated() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.5), nn.Linear(64, 4)).cuda()
    opt = ocnopt.OCNOpt(model.parameters(), lr=0.0, model=model, feedback="nonlinear")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(torch.randn(16, 32, device="cuda")).square().mean()
    loss.backward()
    before = torch.cuda.get_rng_state()
    opt.step()
    assert opt.diagnostics.predicted_change == 0.0  # no step, same masks: the second pass is the first
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("ekfac", [False, True])
def test_eigenbases_are_read_in_the_precision_that_is_allowed(ekfac: bool) -> None:
    """Factors are those of full precision, steps are close."""

    def run(precision: str) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)).cuda()
        opt = ocnopt.OCNOpt(model.parameters(), 0.01, model=model, curvature="kronecker", ekfac=ekfac, damping=0.1)
        x = torch.randn(512, 256, device="cuda")
        torch.set_float32_matmul_precision("highest")
        nn.functional.cross_entropy(model(x), x[:, :8].argmax(1)).backward()
        before = model[0].weight.detach().clone()
        torch.set_float32_matmul_precision(precision)
        opt.step()
        assert torch.get_float32_matmul_precision() == precision
        return opt.state[model[0].weight]["input_factor"], model[0].weight.detach() - before

    allowed = torch.get_float32_matmul_precision()
    try:
        (A, exact), (A_high, close) = run("highest"), run("high")
    finally:
        torch.set_float32_matmul_precision(allowed)
    assert torch.equal(A, A_high)
    assert not torch.equal(exact, close)
    assert (exact - close).norm() < 1e-2 * exact.norm()


def test_a_basis_that_is_ready_waits_for_none_that_is_being_made() -> None:
    large, *small = (torch.randn(1, n, 2 * n, device="cuda") for n in (4096, *[64] * 100))
    large, *small = (x @ x.mT for x in (large, *small))
    with torch.cuda.stream(torch.cuda.Stream()):
        for matrix in small:
            beside.begin([matrix])
        beside.finish([large])  # libraries are loaded
        torch.cuda.synchronize()
        beside.begin([large])
        start, waits, kept = time.perf_counter(), [], []
        while small and not beside._jobs[large].done():
            before = time.perf_counter()
            kept.append(beside.finish([small.pop()]))  # memory that is given back makes events
            waits.append(time.perf_counter() - before)
            time.sleep(0.002)
        whole = time.perf_counter() - start
        beside.finish([large])
    assert len(waits) > 5
    assert max(waits) < whole / 4

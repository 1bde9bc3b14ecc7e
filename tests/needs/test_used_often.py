"""A layer that is used often in a pass keeps sums of its calls instead of the calls, and nobody can tell."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ocnopt import OCNOpt

B, WIDTH, TIMES = 12, 3, 40
SUMS = (WIDTH + 1) ** 2 + WIDTH**2 + B * WIDTH * (WIDTH + 1)  # numbers that stand for all calls of the cell

CASES: list[dict[str, Any]] = [
    {"feedback": "off"},
    {"feedback": "off", "ekfac": False},
    {"feedback": "linear"},
    {"feedback": "linear", "bellman": "paper"},
]
cases = pytest.mark.parametrize("options", CASES, ids=lambda case: "-".join(map(str, case.values())))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(TIMES):
            x = x + 0.1 * torch.sin(3 * self.cell(x))  # neither state nor adjoint dies out: factors of full rank
        return self.head(x)


def made(**options: Any) -> tuple[Recurrent, OCNOpt]:
    model = Recurrent().double()
    return model, OCNOpt(model.parameters(), 0.1, model=model, curvature="kronecker", refresh_every=2, **options)


def loss_of(model: nn.Module, rows: slice = slice(None)) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, WIDTH, dtype=torch.float64, generator=generator)
    return mse_loss(model(x[rows]), x[rows, :2])


def assert_same_training(model: nn.Module, opt: OCNOpt, other: nn.Module, of_other: OCNOpt) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)
        for key, value in opt.state[p].items():
            torch.testing.assert_close(value, of_other.state[q][key], rtol=1e-9, atol=1e-12)


def as_gradients_come(model: nn.Module, opt: OCNOpt, keep: bool) -> None:
    loss_of(model).backward(retain_graph=keep)


def scaled(model: nn.Module, opt: OCNOpt, keep: bool) -> None:
    """As a ``GradScaler`` does."""
    (2.0**16 * loss_of(model)).backward(retain_graph=keep)
    for p in model.parameters():
        p.grad /= 2.0**16


def clipped(model: nn.Module, opt: OCNOpt, keep: bool) -> None:
    loss_of(model).backward(retain_graph=keep)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def in_two_passes(model: nn.Module, opt: OCNOpt, keep: bool) -> None:
    for rows in (slice(0, 5), slice(5, B)):
        (loss_of(model, rows) * (rows.stop - rows.start) / B).backward(retain_graph=keep)


@cases
@pytest.mark.parametrize("backward", [as_gradients_come, scaled, clipped, in_two_passes])
def test_the_same_steps_as_with_all_calls(backward: Any, options: dict[str, Any]) -> None:
    """A graph that is kept may be gone through again, so nothing is added up."""
    trainings = []
    for keep in (False, True):
        model, opt = made(**options)
        for _ in range(3):
            opt.zero_grad()
            backward(model, opt, keep)
            assert opt._tape is not None
            assert any(record.tallies for record in opt._tape.records) != keep
            opt.step()
        trainings += [model, opt]
    assert_same_training(*trainings)


def test_gradients_are_the_same_bits() -> None:
    model, _ = made()
    alone = Recurrent().double()
    loss_of(model).backward()
    loss_of(alone).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True))


def test_what_is_kept_after_the_backward_pass() -> None:
    """The sums, and calls that hold no more than they do, however many there were."""
    model, opt = made()
    loss = loss_of(model)
    loss.backward()
    all_calls = TIMES * B * 2 * WIDTH * 8
    rest = B * (WIDTH + WIDTH + 2 + 2) * 8  # of the head, and the input of the model
    assert opt.memory_usage()["tape"] <= 2 * SUMS * 8 + rest < all_calls
    opt.step()
    assert "tape" not in opt.memory_usage()


def test_a_graph_that_lives_on_holds_no_calls() -> None:
    model, opt = made()
    x = torch.randn(B, WIDTH, dtype=torch.float64)
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    gc.collect()
    held = [t for t in gc.get_objects() if type(t) is Tensor and t.shape == (B, WIDTH)]
    assert {t.data_ptr() for t in held} == {x.data_ptr()}
    del loss


def test_several_backward_passes_through_one_graph_add_up() -> None:
    trainings = []
    for parts in (1, 2):
        model, opt = made()
        loss = loss_of(model)
        for i in range(parts):
            (loss / parts).backward(retain_graph=i + 1 < parts)
        opt.step()
        trainings += [model, opt]
    assert_same_training(*trainings)


def test_a_bad_batch_leaves_no_trace() -> None:
    model, opt = made()
    loss_of(model).backward()
    opt.step()
    before = [p.clone() for p in model.parameters()]
    factors = [opt.state[model.cell.weight][key].clone() for key in ("input_factor", "output_factor", "eigenvalues")]
    opt.zero_grad()
    model(torch.full((B, WIDTH), torch.nan, dtype=torch.float64)).sum().backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # somebody has repaired them
    opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    after = [opt.state[model.cell.weight][key] for key in ("input_factor", "output_factor", "eigenvalues")]
    assert all(torch.equal(a, b) for a, b in zip(after, factors, strict=True))


def test_more_asked_for_after_the_backward_pass_is_said() -> None:
    model, opt = made(feedback="linear")
    loss_of(model).backward()
    opt.param_groups[0]["rank"] = 2
    with pytest.warns(UserWarning, match="cell: more is asked of its calls than before the backward pass"):
        opt.step()

"""Solves from observation to observation: many short ones in a pass share the nodes of the quadrature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ode.fields import Net, batch
from torch import Tensor, nn

from ocnopt import OCNOpt
from ocnopt.ode import NeuralODE
from ocnopt.ode.quadrature import shared_out
from ocnopt.records import Record

B, SOLVES = 5, 24


class Observing(nn.Module):
    """An ODE from each time to the next, with a jump in between, as in an ODE-RNN."""

    def __init__(self, nodes: int, solves: int = SOLVES, time: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ode = NeuralODE(Net(), nodes=nodes, rtol=1e-9, atol=1e-9)
        self.solves, self.time = solves, time

    def forward(self, x: Tensor) -> Tensor:
        for k in range(self.solves):
            x = self.ode(x, t=(self.time * k / self.solves, self.time * (k + 1) / self.solves)) + 0.1 / self.solves
        return x


def look(nodes: int, solves: int = SOLVES) -> tuple[list[int], dict[str, Tensor]]:
    """How many calls were kept of each layer, and its factors."""
    model = Observing(nodes, solves).double()
    opt = OCNOpt(model.parameters(), 0.0, model=model, curvature="kronecker", feedback="off")
    model(batch(B)).square().sum().backward()
    counts: dict[str, int] = {}
    genuine = model.ode.layer_calls

    def counting(*args: object) -> object:
        found = genuine(*args)
        for path, calls in found.items():
            counts[path] = counts.get(path, 0) + len(calls)
        return found

    model.ode.layer_calls = counting
    opt.step()
    state = opt.state[model.ode.field.one.weight]
    return list(counts.values()), {key: state[key] for key in ("input_factor", "output_factor")}


def test_few_nodes_are_kept_and_the_factors_are_the_same() -> None:
    few, factors = look(4)
    many, exact = look(96)
    assert few == [SOLVES] * 2
    assert many == [16 * SOLVES] * 2
    for key, factor in factors.items():
        error = torch.linalg.matrix_norm(factor - exact[key]) / torch.linalg.matrix_norm(exact[key])
        assert error < 1e-3


@pytest.mark.parametrize(("intervals", "each"), [(1, 4), (4, 4), (5, 4), (6, 3), (8, 2), (16, 1), (200, 1)])
def test_how_they_are_shared_out(intervals: int, each: int) -> None:
    assert shared_out(4, intervals) == each


def test_many_solves_are_added_up_as_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the block is solved, what its layers saw is kept of a few solves, and the sums are the same."""
    states = []
    for summed in (True, False):
        if not summed:  # sums that hold more than all calls ever will
            monkeypatch.setattr("ocnopt.curvature.tally.numbers", lambda *_: 10**9)
        model = Observing(1, time=2.0).double()
        opt = OCNOpt(model.parameters(), 0.1, model=model, curvature="kronecker", feedback="off")
        model(batch(B)).square().sum().backward()
        assert opt._tape is not None
        records, genuine, held = opt._tape.records, model.ode.layer_calls, []

        def counting(*args: object, records: list[Record] = records, genuine: Any = genuine, held: Any = held) -> Any:
            held.append(sum(len(calls) for r in records if r.inner is not None for calls in r.inner.values()))
            return genuine(*args)

        model.ode.layer_calls = counting
        opt.step()
        assert (max(held) < 2 * SOLVES / 2) == summed
        states.append([value for p in model.parameters() for value in (p, *opt.state[p].values())])
    for a, b in zip(*states, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)

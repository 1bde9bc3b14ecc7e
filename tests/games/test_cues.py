"""Passes of which it is certain what they do: operations are known by when they come, and that they came is seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.emulated import emulate
from tests.games.test_expected_chains import train
from tests.games.test_odd import CLASSES, IN, Net, data, make
from tests.games.test_settled import Looks
from tests.games.test_watched import unforeseen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ocnopt import OCNOpt
from ocnopt.capture import Tape
from ocnopt.games.cues import Attendance, Cues
from ocnopt.games.following import Habit
from ocnopt.games.recorder import take_off
from ocnopt.games.settled import Settled
from ocnopt.intake import taken_in


def cues_of(opt: OCNOpt) -> Cues:
    assert opt._tape is not None
    (habit,) = opt._tape.follower._habits.values()
    assert isinstance(habit, Habit)
    assert habit.cues is not None
    return habit.cues


def _end(cues: Cues, done: Sequence[str]) -> bool:
    """Of a pass that does this and no more: calls of players, by name, and the sum of a residual block."""
    attendance = Attendance(cues, lambda t, value, entry, alone: t)
    for what in done:
        if what == "sum":
            torch.ones(2) + torch.ones(2)
        else:
            attendance.enter(what)
            attendance.leave()
    return attendance.end()


class Tail(Net):
    """The last to read is an operation."""

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.a(torch.tanh(self.into(x))))) + self.b(self.into(x)).sum(1, keepdim=True)


@pytest.mark.parametrize(("done", "complete"), [("into a head into b sum", True), ("into a head into b", False)])
def test_what_is_missing_in_the_end_is_missed(done: str, complete: bool) -> None:
    model, opt = make(Tail, lr=0.1)
    train(model, opt, 5)
    assert _end(cues_of(opt), done.split()) is complete


@pytest.mark.parametrize(
    ("done", "complete"),
    [
        ("into a b sum head", True),
        ("into a b head sum", False),
        ("into a b head", False),
        ("into b a sum head", False),
        ("into a b sum", False),
        ("into a b sum head head", False),
    ],
)
def test_what_is_missing_is_missed(done: str, complete: bool) -> None:
    model, opt = make(Net, lr=0.1)
    train(model, opt, 5)
    assert _end(cues_of(opt), done.split()) is complete
    assert _get_current_function_mode_stack() == []


class Growing(Net):
    layers = 1

    def block(self, z: Tensor) -> Tensor:
        for _ in range(self.layers):
            z = z + self.b(torch.tanh(self.a(z)))
        return z


def test_what_was_certain_and_did_not_come_is_said() -> None:
    """Should anything ever have been overlooked: the step does without it, and later passes are looked at."""
    model, opt = make(Growing, lr=0.1)
    train(model, opt, 5)
    model.layers = 2
    with patch.object(Settled, "holds", lambda self, anatomy: True):
        train(model, opt, 1)
        assert "was not seen" in (opt.game.why_accumulated or "")
        with Looks() as looks:
            train(model, opt, 6)
    assert looks.call_count == 6
    assert opt.game.why_accumulated is None


class Wide(nn.Module):
    """Several edges into one operation, those of other turns first."""

    unused = 0

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(IN, 4)
        self.layers = nn.ModuleList([nn.Linear(4 * i, 4) for i in range(1, 4)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = [torch.tanh(self.into(x))]
        for layer in self.layers:
            found.append(torch.tanh(layer(torch.cat([found[-1], *found[:-1]], 1))))
        out: Tensor = self.head(torch.cat(found, 1))
        return out


@pytest.mark.parametrize("rank", [1, 3])
def test_some_passes_are_looked_at_and_some_are_not(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps from graphs read the same of both."""
    emulate(monkeypatch)
    found = []
    for may in (True, False):
        model, opt = make(Wide, lr=0.1, rank=rank, graphed=None if may else False)
        steps = []
        for i in range(20):
            if i % 3 == 2:
                model.unused = i
            if may:
                steps += train(model, opt, 1, i)
            else:
                with unforeseen():
                    steps += train(model, opt, 1, i)
        assert not may or (opt._replays.reason is None and opt._replays.captures == 1)
        found.append(steps)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("chain", [False, True])
def test_steps_that_read_other_edges_are_of_another_kind(chain: bool) -> None:
    model, opt = make(lambda: nn.Sequential(nn.Linear(IN, 4), nn.Linear(4, CLASSES)) if chain else Wide(), lr=0.1)
    train(model, opt, 5)
    x, y = data(6)
    nn.functional.cross_entropy(model(x), y).backward()
    assert opt._tape is not None
    (this,) = opt._tape.passes
    stores: list[Any] = [this.readings, *(record.readings for record in opt._tape.records)]
    stores = [store for store in stores if store]
    assert stores
    for store in stores:
        kind, before = taken_in(opt._tape).kind, dict(store)
        store.clear()
        store.update({(key, -1): reading for key, reading in before.items()})
        assert taken_in(opt._tape).kind != kind
        store.clear()
        store.update(before)


class Twice(nn.Module):
    """What ``b`` reads is read by a sum, too, and what ``c`` reads is returned; ``d`` is alone."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.a, self.b, self.c, self.d = nn.Linear(IN, 3), *(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        second = torch.tanh(self.a(torch.tanh(self.into(x))))
        third = torch.tanh(self.b(second)) + second
        return self.d(torch.tanh(self.c(third))), third


def test_who_reads_alone_needs_no_alias() -> None:
    model, opt = make(Twice, lr=0.1)
    seen: dict[str, bool] = {}
    alias = Tape.alias

    def spy(self: Tape, t: Tensor, this: Any, record: Any, *others: Any) -> Tensor:
        out = alias(self, t, this, record, *others)
        if this.certain is not None:
            reading = others[0][others[1]]
            seen.update((name, out is t) for name, theirs in this.readings_of_players if theirs is reading)
        return out

    def step(i: int) -> None:
        torch.manual_seed(i)
        out, third = model(torch.randn(6, IN, dtype=torch.float64))
        opt.zero_grad()
        (out.square().mean() + third.sin().mean()).backward()
        opt.step()

    with patch.object(Tape, "alias", spy):
        for i in range(6):
            step(i)
    assert {name: seen.get(name) for name in "bcd"} == {"b": False, "c": False, "d": True}


class Nothing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_among_others_is_taken_off() -> None:
    modes = [Nothing() for _ in range(3)]
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)
    for _ in range(2):  # the second time it is there no more
        take_off(modes[1])
    assert _get_current_function_mode_stack() == [modes[0], modes[2]]
    for _ in range(2):
        torch._C._pop_torch_function_stack()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_an_input_without_strides() -> None:
    class Sparse(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.to_dense())

    model, opt = make(Sparse, lr=0.1)
    for i in range(4):
        torch.manual_seed(i)
        opt.zero_grad()
        model(torch.randn(6, IN, dtype=torch.float64).to_sparse_csr()).square().sum().backward()
        opt.step()
    assert opt.game.why_accumulated is None

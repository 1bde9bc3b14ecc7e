"""A new eigenbasis serves a tenth of the interval after its statistics: long enough to be made beside the steps."""

from __future__ import annotations

import copy
import threading
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.toys import assert_identical, batches, mlp, state_of, train, values
from torch import Tensor, nn

from ocnopt import OCNOpt, clockwork
from ocnopt.curvature import beside, eigen

EVERY = 30  # three layers: turns after 10, 20 and 30 steps; bases serve 3 steps later


def make(**options: Any) -> tuple[nn.Sequential, OCNOpt]:
    model = mlp()
    settings = {"curvature": "kronecker", "refresh_every": EVERY, **options}
    return model, OCNOpt(model.parameters(), 0.01, model=model, **settings)


def first(model: nn.Sequential, opt: OCNOpt) -> dict[str, Any]:
    """The layer whose turn is first: the largest."""
    own: dict[str, Any] = opt.state[model[0][0].weight]
    return own


@pytest.mark.parametrize("catches_up", [False, True])
def test_when_it_serves_and_of_what_it_is(catches_up: bool) -> None:
    """Catching up is what captured steps do beforehand."""
    model, opt = make()
    own, factors, changed = {}, [], []
    basis: Tensor | None = None
    for step, batch in enumerate(batches(80), start=1):
        if catches_up:
            with torch.no_grad():
                clockwork.catch_up(opt)
        train(model, opt, [batch])
        own = first(model, opt)
        factors.append(own["input_factor"].clone())
        if basis is None or not torch.equal(own["input_basis"], basis):
            basis = own["input_basis"].clone()
            expected = eigen.safe_eigh(factors[own["refreshed_at"] - 1])
            assert expected is not None
            torch.testing.assert_close(basis, expected[1])
            changed.append((own["refreshed_at"], step))
    # of the statistics of so many steps, and in which step it was there first
    assert changed == [(1, 1), (11, 15), (41, 45), (71, 75)]
    assert "next_input_factor" not in own


def test_bad_steps_in_the_meantime_change_nothing() -> None:
    model, opt = make()
    train(model, opt, batches(12))
    own, made = first(model, opt), first(model, opt)["next_input_factor"].clone()
    x, y = batches()[0]
    train(model, opt, [(x * torch.nan, y)])
    assert torch.equal(own["next_input_factor"], made)
    train(model, opt, batches(3))
    assert "next_input_factor" not in own
    expected = eigen.safe_eigh(made)
    assert expected is not None
    torch.testing.assert_close(own["input_basis"], expected[1])


def test_a_copy_without_what_was_set_aside_makes_another_one() -> None:
    """Some ways to keep state know of no keys that come and go."""
    model, opt = make()
    train(model, opt, batches(12))
    own = first(model, opt)
    old = own["input_basis"].clone()
    for key in ("next_input_factor", "next_output_factor"):
        del own[key]
    train(model, opt, batches(4))
    assert not torch.equal(own["input_basis"], old)
    assert own["basis_at"] == own["refreshed_at"] == 11


def test_one_that_fails_is_counted_and_begun_again() -> None:
    model, opt = make()
    train(model, opt, batches(12))
    own = first(model, opt)
    old = own["input_basis"].clone()
    own["next_input_factor"][:] = torch.nan
    failed = []
    for batch in batches(8):
        train(model, opt, [batch])
        failed.append(opt.diagnostics.failed_refreshes)
        if failed[-1]:
            assert torch.equal(own["input_basis"], old)
    assert failed == [0, 0, 1, 0, 0, 0, 0, 0]
    assert own["basis_at"] == own["refreshed_at"] == 14
    assert not torch.equal(own["input_basis"], old)


def test_a_change_of_mind_forgets_it() -> None:
    model, opt = make()
    train(model, opt, batches(12))
    assert "next_input_factor" in first(model, opt)
    opt.param_groups[0]["refresh_every"] = 1
    train(model, opt, batches(1))
    assert "next_input_factor" not in first(model, opt)
    assert first(model, opt)["basis_at"] == 13


def test_graphs_do_not_see_it() -> None:
    model, opt = make()
    train(model, opt, batches(2))
    before = clockwork.frozen(opt, [], [])
    train(model, opt, batches(10))
    assert "next_input_factor" in first(model, opt)
    assert clockwork.frozen(opt, [], []) == before


def test_it_is_counted_as_memory() -> None:
    model, opt = make()
    train(model, opt, batches(2))
    before = opt.memory_usage()["Kronecker factors"]
    train(model, opt, batches(10))
    assert opt.memory_usage()["Kronecker factors"] > before


# --- in a thread: here there is no device, and streams are none ---


class Nothing:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = "cpu"

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: Nothing()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of those that have decomposed something."""
    found: list[str] = []

    def watched(matrices: Any) -> Any:
        found.append(threading.current_thread().name)
        return eigen.batched(matrices)

    monkeypatch.setattr(beside, "_is_beside", lambda matrix: True)
    monkeypatch.setattr(beside, "batched", watched)
    monkeypatch.setattr(beside, "_stream", lambda device: Nothing())
    monkeypatch.setattr(torch.cuda, "current_stream", Nothing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: None)
    return found


def test_a_thread_makes_the_same_numbers(threads: list[str]) -> None:
    (model, opt), data = make(), batches(50)
    train(model, opt, data)
    assert len(threads) == 4
    assert all(name.startswith("ocnopt") for name in threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beside, "_is_beside", lambda matrix: False)
        other, theirs = make()
        train(other, theirs, data)
    assert len(threads) == 8
    assert_identical(values(model), values(other))
    assert_identical(state_of(opt), state_of(theirs))


def test_what_is_handed_over_is_done(threads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that had an event to wait for would be held up by the next decomposition."""
    done: list[str] = []

    class Event:
        def synchronize(self) -> None:
            done.append(threading.current_thread().name)

    class Stream(Nothing):
        def record_event(self) -> Event:
            return Event()

    class Present(Nothing):
        def wait_event(self, event: Any) -> None:
            raise AssertionError("nothing is left to wait for")

    monkeypatch.setattr(beside, "_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", Present)
    matrix = torch.eye(3, dtype=torch.float64)[None]
    beside.begin([matrix])
    (found,) = beside.finish([matrix])
    assert found is not None
    assert done == threads
    assert len(done) == 1


def test_steps_go_on_while_it_works_and_wait_when_its_time_has_come(
    threads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, whole = threading.Event(), beside.batched
    monkeypatch.setattr(beside, "batched", lambda matrices: whole(matrices) if gate.wait(60) else None)
    (model, opt), data = make(), batches(15)
    train(model, opt, data[:14])  # the last of them would be the first to need it
    assert threads == []
    threading.Timer(0.2, gate.set).start()
    train(model, opt, data[14:])
    assert len(threads) == 1
    beside.wait()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("way", [copy.deepcopy, lambda saved: saved])
def test_a_checkpoint_while_it_works(way: Any) -> None:
    (model, opt), data = make(), batches(40)
    train(model, opt, data[:12])
    other, theirs = make()
    other.load_state_dict(model.state_dict())
    theirs.load_state_dict(way(opt.state_dict()))
    for m, o in ((model, opt), (other, theirs)):
        train(m, o, data[12:])
    assert_identical(values(model), values(other))
    assert_identical(state_of(opt), state_of(theirs))


@pytest.mark.usefixtures("threads")
def test_an_exception_in_the_thread_leaves_the_old_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(matrices: Any) -> Any:
        raise torch.OutOfMemoryError("nothing left")

    model, opt = make()
    train(model, opt, batches(1))
    old = first(model, opt)["input_basis"].clone()
    monkeypatch.setattr(beside, "batched", broken)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, opt, batches(14))
    assert opt.diagnostics.failed_refreshes == 1
    assert torch.equal(first(model, opt)["input_basis"], old)

"""What a pass is compared with before its data flow is trusted, and what must not stand in the way."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.games.test_odd import CLASSES, IN, WIDTH, B, Net, data, make
from tests.games.test_watched import Reversed, train
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt
from ocnopt.games import replay


def s_of(model: nn.Module, opt: OCNOpt, seed: int) -> Tensor:
    """Of one step."""
    x, y = data(seed)
    opt.zero_grad()
    cross_entropy(model(x), y).backward()
    opt.step()
    assert opt.diagnostics.s is not None
    return opt.diagnostics.s


class ReversedBesides(Reversed):
    """The first player is not on the way to what is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(IN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        beside = self.beside(x)
        out: Tensor = super().forward(x)
        return out + beside


@pytest.mark.parametrize("rank", [1, 3])
def test_a_pass_that_was_watched_is_compared_in_all_that_was_read(rank: int) -> None:
    model, opt = make(ReversedBesides, lr=0.3, rank=rank)
    train(model, opt, 4)
    model.odd = True
    assert train(model, opt, 1) == [True]
    assert "give other numbers" in (opt.game.why_accumulated or "")


class Gate(nn.Module):
    """Whose parameter has a part in nothing, or none that is asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.on = nn.Parameter(torch.ones(WIDTH)), False

    def forward(self, z: Tensor, k: int = 0) -> Tensor:
        return z * self.scale if self.on else z


class Gated(Net):
    by_name = False

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def block(self, z: Tensor) -> Tensor:
        options: Any = {"k": 1} if self.by_name else {}
        return self.gate(z, **options) + self.b(torch.relu(self.gate(self.a(z), **options)))


class GatedByName(Gated):
    by_name = True


@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("net", [Gated, GatedByName])
def test_a_player_whose_parameters_are_out_of_reach_is_heard(net: Any, rank: int) -> None:
    model, opt = make(net, lr=0.3, rank=rank)
    found = [s_of(model, opt, i) for i in range(4)]
    assert opt._tape is not None
    again, fresh = make(net, lr=0.3, rank=rank)
    for i, s in enumerate(found):
        torch.testing.assert_close(s, s_of(again, fresh, i), rtol=1e-9, atol=1e-12)
        fresh.detach()
        fresh = OCNOpt(again.parameters(), **fresh.defaults, model=again)


class Elsewhere(Net):
    """What is saved for the backward pass is kept elsewhere, so that it may be overwritten."""

    def block(self, z: Tensor) -> Tensor:
        with saved_tensors_hooks(torch.clone, lambda t: t):
            h = torch.exp(self.a(z))
            g = self.b(h * 1.0)
            h.mul_(2.0)
            return torch.tanh(z + g + h)


@pytest.mark.parametrize("passes", [1, 2])
def test_what_cannot_be_overwritten_again_is_copied(passes: int) -> None:
    model, opt = make(Elsewhere, lr=0.1)
    train(model, opt, 3, passes)
    assert opt.game.why_accumulated is None


class Handed(Net):
    """A player hands out its parameter as it is."""

    class Parameter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH))

        def forward(self, z: Tensor) -> Tensor:
            return self.weight

    def __init__(self) -> None:
        super().__init__()
        self.p = self.Parameter()

    def block(self, z: Tensor) -> Tensor:
        return z * self.p(z) + self.b(torch.relu(self.a(z)))


@pytest.mark.parametrize("net", [Net, Elsewhere, Handed])
def test_nothing_holds_a_replay(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    real = replay._Again.__init__

    def init(self: replay._Again, *args: Any) -> None:
        real(self, *args)
        made.append(weakref.ref(self))

    monkeypatch.setattr(replay._Again, "__init__", init)
    model, opt = make(net, lr=0.1)
    train(model, opt, 2)
    opt.zero_grad()
    opt.detach()
    gc.collect()
    assert made
    assert not any(ref() is not None for ref in made)
    assert not any(p._backward_hooks for p in model.parameters())


@pytest.mark.parametrize("at", [0, 9])
def test_a_bad_batch_says_nothing_about_the_data_flow(at: int) -> None:
    """At a step at which it is verified; that is then done at the next."""
    model, opt = make(Net, lr=0.1)
    for i in range(at + 2):
        x, y = data(i)
        opt.zero_grad()
        cross_entropy(model(x * torch.nan if i == at else x), y).backward()
        assert opt._tape is not None
        flow = opt._tape.passes[0].flow
        opt.step()
        assert opt.game.why_accumulated is None
    assert flow is not None
    assert flow.uses == at + 1


class Counting(nn.Linear):
    """Does something else at each call."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, z: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(z) * (3.0 if self.calls % 2 else 1.0)


class Alternating(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = Counting()

    def block(self, z: Tensor) -> Tensor:
        z = torch.relu_(1.0 * z)
        return z + self.c(torch.tanh(self.a(z)))


class Hidden(Alternating):
    """Of an output that is not finite nothing can be told; of the others it can."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return torch.cat([out, out[:, :1].masked_fill(torch.tensor(True), -torch.inf)], 1)


@pytest.mark.parametrize("net", [Alternating, Hidden])
def test_who_gives_other_numbers_is_not_asked_twice(net: Any) -> None:
    model, opt = make(net, lr=0.1)
    train(model, opt, 1)
    assert "give other numbers" in (opt.game.why_accumulated or "")
    assert model.c.calls == 3  # the pass, the look at it, and the second pass


class Masked(Net):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return torch.cat([out, out[:, :1].masked_fill(torch.tensor(True), -torch.inf)], 1)


def test_outputs_that_are_not_finite() -> None:
    model, opt = make(Masked, lr=0.1)
    assert train(model, opt, 4) == [False, False, True, True]
    assert opt.game.why_accumulated is None


@pytest.mark.parametrize("scale", [1e20, 1e25])
def test_squares_that_are_too_large(scale: float) -> None:
    """Of adjoints that are not."""
    model, _ = make(Net, lr=0.1)
    model.float()
    opt = OCNOpt(model.parameters(), model=model, lr=0.1, feedback="nonlinear", curvature="identity")
    for i in range(2):
        x, y = data(i)
        opt.zero_grad()
        ((scale if i == 0 else 1.0) * cross_entropy(model(x.float()), y)).backward()
        opt.step()
        assert opt.game.why_accumulated is None


def test_memory_that_runs_out_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def run(self: replay._Again, *_: Any) -> None:
        tried.append(self)
        self.has_overwritten = True
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(replay._Again, "run", run)
    model, opt = make(Net, lr=0.1)
    train(model, opt, 1)
    assert len(tried) == 1
    assert "none left" in (opt.game.why_accumulated or "")


class Graph(Net):
    """A product with a sparse matrix, and something in place."""

    def forward(self, x: Tensor) -> Tensor:
        A = torch.eye(B, dtype=x.dtype).to_sparse()
        h = torch.relu_(torch.sparse.mm(A, self.into(x)))
        out: Tensor = self.head(torch.relu_(torch.sparse.mm(A, self.a(h))) + h)
        return out


def test_a_sparse_matrix() -> None:
    model, opt = make(Graph, lr=0.1)
    train(model, opt, 3)
    assert opt.game.why_accumulated is None

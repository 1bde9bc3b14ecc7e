"""``torch.compile``: a compiled model trains as the model does; what the hooks cannot see is said."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.toys import CLASSES, FEATURES, SOME_GAMES, assert_identical, backward, batches, mlp, name_of, train, values
from torch import Tensor, nn

from ocnopt import OCNOpt
from ocnopt.games.cues import Attendance

# torch's own, in the compiler: any warning is an error here
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

BACKENDS = ("eager", "aot_eager")
HOOKED = SOME_GAMES[1:]
games = pytest.mark.parametrize("game", HOOKED, ids=name_of)


@pytest.fixture(autouse=True)
def nothing_compiled(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Each test starts anew, and none runs into a limit of recompilations, which is only logged."""
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "torch._dynamo"):
        yield
    assert not [record for record in caplog.records if "recompile_limit" in record.getMessage()]
    torch._dynamo.reset()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.inner = nn.Linear(FEATURES, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + torch.tanh(self.inner(self.norm(x))).mul(0.5)
        return self.head(torch.relu(x + 1))


def attached_first(model: nn.Module, backend: str, game: dict[str, Any]) -> tuple[nn.Module, OCNOpt]:
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    return torch.compile(model, backend=backend), opt


def compiled_first(model: nn.Module, backend: str, game: dict[str, Any]) -> tuple[nn.Module, OCNOpt]:
    compiled = torch.compile(model, backend=backend)
    return compiled, OCNOpt(model.parameters(), 0.05, model=model, **game)


def wrapper_attached(model: nn.Module, backend: str, game: dict[str, Any]) -> tuple[nn.Module, OCNOpt]:
    compiled = torch.compile(model, backend=backend)
    return compiled, OCNOpt(compiled.parameters(), 0.05, model=compiled, **game)


def in_place(model: nn.Module, backend: str, game: dict[str, Any]) -> tuple[nn.Module, OCNOpt]:
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    model.compile(backend=backend)
    return model, opt


WAYS = [attached_first, compiled_first, wrapper_attached, in_place]
# every way with one backend, the recommended one with the other
CASES = [*product(WAYS, BACKENDS[:1]), (attached_first, BACKENDS[1])]


@pytest.mark.parametrize(("way", "backend"), CASES, ids=[f"{w.__name__} {b}" for w, b in CASES])
@pytest.mark.parametrize("net", [mlp, Residual], ids=["chain", "residual"])
@games
def test_the_same_training(game: dict[str, Any], net: Callable[[], nn.Module], way: Any, backend: str) -> None:
    plain = net()
    expected = train(plain, OCNOpt(plain.parameters(), 0.05, model=plain, **game), batches(3))
    model = net()
    compiled, opt = way(model, backend, game)
    assert train(compiled, opt, batches(3)) == expected
    assert_identical(values(model), values(plain))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch's compiler
@games
def test_the_same_training_with_inductor(game: dict[str, Any]) -> None:
    """To rounding: fused operations round elsewhere."""
    plain, model = Residual(), Residual()
    expected = train(plain, OCNOpt(plain.parameters(), 0.05, model=plain, **game), batches(3))
    compiled, opt = attached_first(model, "inductor", game)
    torch.testing.assert_close(train(compiled, opt, batches(3)), expected, rtol=1e-6, atol=1e-9)


def compiled_files() -> list[str]:
    """The files of the functions that were compiled since this was last asked."""
    found = torch._dynamo.utils.get_compilation_metrics()
    torch._dynamo.utils.clear_compilation_metrics()
    return [Path(each.co_filename).parent.name for each in found]


@pytest.mark.parametrize("way", [attached_first, in_place])
@games
def test_only_the_model_is_compiled_and_only_once(game: dict[str, Any], way: Any) -> None:
    """Not the hooks, nor what follows the operations; and a second forward pass is not compiled."""
    torch._dynamo.utils.clear_compilation_metrics()  # of other tests
    compiled, opt = way(Residual(), "eager", game)
    x, y = batches()[0]
    backward(compiled, x, y)
    found = compiled_files()
    assert found
    assert "ocnopt" not in found
    assert "games" not in found
    opt.step()
    assert not compiled_files()
    train(compiled, opt, [(x, y)] * 2)
    assert not compiled_files()


def test_what_reads_nothing_but_gradients_leaves_the_graph_whole() -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.05, model=model)
    train(torch.compile(model, backend="eager", fullgraph=True), opt, batches(2))


@games
def test_hooks_break_the_graph_and_a_full_one_is_refused_by_torch(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Hook\.__call__"):
        train(torch.compile(model, backend="eager", fullgraph=True), opt, batches(1))


@pytest.mark.parametrize("game", [*HOOKED, {"bellman": "paper"}, {"game": "noncooperative"}], ids=name_of)
def test_a_model_that_ran_before_it_was_attached_is_not_seen_and_that_is_said(game: dict[str, Any]) -> None:
    """Compiled code does not look for new hooks: nothing reaches the optimizer, which must not go on silently."""
    model = mlp()
    compiled = torch.compile(model, backend="eager")
    backward(compiled, *batches()[0])
    model.zero_grad()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    backward(compiled, *batches()[0])
    before = values(model)
    if game in HOOKED:
        with pytest.raises(RuntimeError, match=r"none was seen.*attach.*before.*torch\.compile"):
            opt.step()
        assert_identical(values(model), before)
    else:
        with pytest.warns(UserWarning, match="none of its forward passes was seen"):
            opt.step()
    torch._dynamo.reset()  # compile again, with the hooks
    opt.zero_grad()
    train(compiled, opt, batches(2))


@pytest.mark.parametrize("game", [g for g in HOOKED if g["feedback"] == "nonlinear"], ids=name_of)
def test_hooks_of_others_see_a_step_once(game: dict[str, Any]) -> None:
    """Also where the second pass calls a module that is compiled in place; and an evaluation after it calls them."""
    model, seen = mlp(), []
    model[0][0].register_forward_hook(lambda *_: seen.append(1))
    compiled, opt = in_place(model, "eager", game)
    for _ in range(3):
        train(compiled, opt, batches(1))
    assert len(seen) == 3
    with torch.no_grad():
        compiled(batches()[0][0])
    assert len(seen) == 4


@pytest.mark.parametrize("part", ["", "inner", "norm"])
def test_compiled_after_it_was_trained(part: str) -> None:
    """Nobody needed to look at its passes any more. Of compiled code that is not known, and a compiler is not to follow
    whoever listens in a pass that is certain.
    """
    found = []
    for compiled in (False, True):
        model = Residual()
        opt = OCNOpt(model.parameters(), 0.05, model=model, curvature="identity", feedback="nonlinear")
        train(model, opt, batches(6))
        if compiled:
            model.get_submodule(part).compile(backend="aot_eager")
        with patch.object(Attendance, "__init__", autospec=True, side_effect=Attendance.__init__) as certain:
            train(model, opt, batches(3, seed=1))
        if not part:
            assert bool(certain.call_count) is not compiled
        found.append(values(model))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)

"""Nothing is held longer than a step, and nothing grows."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from tests.toys import GAMES, SOME_GAMES, backward, batches, mlp, name_of, train
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ocnopt import OCNOpt, stock

games = pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)


@pytest.fixture(autouse=True)
def without_garbage_collection() -> Iterator[None]:
    """Reference counts alone must do: a collector that comes by every now and then is no plan for activations."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def memory_of_layers(model: nn.Module) -> list[StorageWeakRef]:
    """Weak references to the memory of what every layer of the model will compute."""
    found: list[StorageWeakRef] = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Tanh)):
            module.register_forward_hook(lambda m, a, out: found.append(StorageWeakRef(out.untyped_storage())))
    return found


def live_tensors() -> int:
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())  # isinstance asks the object, which may warn


@games
def test_no_record_survives_a_step_or_zero_grad(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, **game)
    backward(model, *batches()[0])
    if opt._tape is not None:
        assert opt._tape.records
    opt.step()
    assert opt._tape is None or not opt._tape.records
    backward(model, *batches()[0])
    opt.zero_grad()
    assert opt._tape is None or not opt._tape.records


@games
def test_a_graph_that_is_thrown_away_takes_its_records_along(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, **game)
    train(model, opt, batches(1))
    memory = memory_of_layers(model)
    output = model(batches()[0][0])
    assert not all(m.expired() for m in memory)
    del output
    assert all(m.expired() for m in memory)


@pytest.mark.parametrize("game", [*GAMES, {"feedback": "off"}], ids=name_of)
def test_inputs_are_let_go_after_the_step(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, **game)
    train(model, opt, batches(1))
    for clear in (opt.step, opt.zero_grad):
        memory, (x, y) = memory_of_layers(model), batches()[0]
        memory.append(StorageWeakRef(x.untyped_storage()))
        opt.zero_grad()
        backward(model, x, y)
        clear()
        del x
        assert len(memory) > 4
        assert all(m.expired() for m in memory)


@games
def test_gradients_are_let_go(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, **game)
    train(model, opt, batches(2))
    memory = [StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters()]
    opt.zero_grad()
    assert all(m.expired() for m in memory)


@games
def test_a_forward_pass_that_raised_holds_nothing(game: dict[str, Any]) -> None:
    class Fuse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise InterruptedError

    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, **game)
    train(model, opt, batches(1))
    memory = memory_of_layers(model)
    whole, model[1] = model[1], Fuse()
    with contextlib.suppress(InterruptedError):
        model(batches()[0][0])
    model[1] = whole
    assert len(memory) == 2
    assert all(m.expired() for m in memory)


@games
def test_fifty_steps_without_growth(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, refresh_every=7, **game)
    (x, y) = batches()[0]
    counts = []
    for i in range(50):
        if i % 5 == 0:
            model(x)  # thrown away
        if i % 7 == 0:
            train(model, opt, [(x[:4], y[:4])])
        train(model, opt, [(x, y)])
        if i % 10 == 9:
            _ = opt.diagnostics.layers
            opt.zero_grad()
            counts.append(live_tensors())
    assert counts[-1] <= counts[1]


def test_the_optimizer_lets_go_of_a_detached_model() -> None:
    model = mlp()
    opt = OCNOpt([p for p in model.parameters()], model=model, rank=2)  # noqa: C416
    train(model, opt, batches(1))
    opt.detach()
    gone = weakref.ref(model)
    del model
    gc.collect()  # modules refer to themselves in cycles of their own
    assert gone() is None


def test_memory_usage_by_category() -> None:
    model = mlp()
    count = sum(p.numel() for p in model.parameters())
    size = next(model.parameters()).element_size()
    opt = OCNOpt(model.parameters(), model=model)
    assert opt.memory_usage() == {}
    train(model, opt, batches(1))
    used = opt.memory_usage()
    assert used == {"momentum": size * count, "adaptive curvature": size * count, "other state": 4}  # one clock


def test_memory_usage_of_the_tape_and_of_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "_FEW", 1)
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, curvature="kronecker", feedback="nonlinear", momentum=0.0)
    x, y = batches(1)[0]
    backward(model, x, y)
    sizes = [m.in_features + m.out_features for m in model.modules() if isinstance(m, nn.Linear)]
    # input and adjoint of every layer, its gradient at the input but for the first, and what the model returned
    assert opt.memory_usage()["tape"] >= x.element_size() * len(x) * sum(sizes)
    opt.step()
    used = opt.memory_usage()
    assert set(used) == {"Kronecker factors", "eigenbases", "other state", "to be used again"}
    layers = [(m.in_features + 1, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
    parameters = x.element_size() * sum(p.numel() for p in model.parameters())
    assert used["to be used again"] == parameters  # before state was there to be copied
    assert used["Kronecker factors"] == x.element_size() * sum(a * a + c * c for a, c in layers)
    assert used["eigenbases"] == x.element_size() * sum(a * a + c * c + a * c for a, c in layers)

"""An optimizer that nobody holds any more is gone, and its hooks with it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from tests.toys import SOME_GAMES, assert_identical, backward, batches, hooks_on, mlp, name_of, state_of, train, values

from ocnopt import OCNOpt

HOOKED = SOME_GAMES[1:]  # the first reads nothing but p.grad
games = pytest.mark.parametrize("game", HOOKED, ids=name_of)


@games
@pytest.mark.parametrize("when", ["new", "after steps", "after a backward pass"])
def test_takes_its_hooks_along(game: dict[str, Any], when: str) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, **game)
    assert hooks_on(model) > 0
    if when != "new":
        train(model, opt, batches(2))
    if when == "after a backward pass":
        backward(model, *batches()[0])
    there = weakref.ref(opt)
    del opt
    gc.collect()
    assert there() is None
    assert hooks_on(model) == 0


@games
def test_a_second_optimizer_is_as_good_as_the_first(game: dict[str, Any]) -> None:
    runs = []
    for forgotten in (True, False):
        model = mlp()
        if forgotten:
            opt = OCNOpt(model.parameters(), 0.0, model=model, **game)
            train(model, opt, batches(1))
            opt.zero_grad()
        opt = OCNOpt(model.parameters(), 0.05, model=model, **game)  # the name is taken over, as in a notebook
        gc.collect()
        train(model, opt, batches(2))
        runs.append((values(model), state_of(opt), hooks_on(model)))
    assert_identical(*runs)


@games
def test_two_at_a_time_do_not_disturb_each_other(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    hooks = hooks_on(model)
    other = OCNOpt(model.parameters(), 0.05, model=model, **game)
    assert hooks_on(model) == 2 * hooks
    train(model, opt, batches(1))
    del other
    gc.collect()
    assert hooks_on(model) == hooks
    train(model, opt, batches(1))
    alone = mlp()
    train(alone, OCNOpt(alone.parameters(), 0.05, model=alone, **game), batches(1) * 2)
    assert_identical(values(model), values(alone))


@games
def test_attaching_again_leaves_one_set_of_hooks(game: dict[str, Any]) -> None:
    model, other = mlp(), mlp()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    hooks = hooks_on(model)
    opt.attach(model)
    opt.attach(model)
    assert hooks_on(model) == hooks
    train(model, opt, batches(2))
    train(other, OCNOpt(other.parameters(), 0.05, model=other, **game), batches(2))
    assert_identical(values(model), values(other))
    opt.detach()
    assert hooks_on(model) == 0
    opt.detach()  # a second time is no harm


@games
def test_a_model_goes_with_its_optimizer(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, **game)
    train(model, opt, batches(1))
    there = weakref.ref(model)
    del model, opt
    gc.collect()
    assert there() is None

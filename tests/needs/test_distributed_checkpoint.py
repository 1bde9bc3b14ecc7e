"""``torch.distributed.checkpoint`` loads into state that is there: an optimizer that never stepped must have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.toys import GAMES, SOME_GAMES, assert_identical, batches, mlp, name_of, state_of, train, values
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from ocnopt import OCNOpt

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

games = pytest.mark.parametrize("game", [*SOME_GAMES, {"feedback": "off", "curvature": "kronecker"}], ids=name_of)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def make(game: dict[str, Any], dtype: torch.dtype, seed: int = 0, lr: float = 0.05) -> tuple[nn.Module, OCNOpt]:
    model = mlp(dtype=dtype, seed=seed)
    groups = [{"params": list(model[:2].parameters())}, {"params": list(model[2].parameters()), "weight_decay": 0.1}]
    return model, OCNOpt(groups, lr, model=model, refresh_every=2, **game)


def assert_same_future(ours: tuple[nn.Module, OCNOpt], theirs: tuple[nn.Module, OCNOpt]) -> None:
    assert_identical(state_of(ours[1]), state_of(theirs[1]))
    more = batches(3, dtype=next(ours[0].parameters()).dtype, seed=8)
    assert train(*ours, more) == train(*theirs, more)
    assert_identical(values(ours[0]), values(theirs[0]))
    assert_identical(state_of(ours[1]), state_of(theirs[1]))


@dtypes
@games
def test_saved_and_loaded(game: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model, opt = make(game, dtype)
    train(model, opt, batches(3, dtype=dtype))
    dcp.save({"model": model.state_dict(), "optim": get_optimizer_state_dict(model, opt)}, checkpoint_id=tmp_path)
    twin, fresh = make(game, dtype, seed=9, lr=0.5)
    into = {"model": twin.state_dict(), "optim": get_optimizer_state_dict(twin, fresh)}
    dcp.load(into, checkpoint_id=tmp_path)
    twin.load_state_dict(into["model"])
    set_optimizer_state_dict(twin, fresh, into["optim"])
    assert fresh.param_groups[0]["lr"] == 0.05
    assert_same_future((twin, fresh), (model, opt))


@dtypes
@games
def test_one_dictionary_for_both(game: dict[str, Any], dtype: torch.dtype) -> None:
    """``get_state_dict`` and ``set_state_dict``, with flattened names as well."""
    for options in (StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)):
        model, opt = make(game, dtype)
        train(model, opt, batches(3, dtype=dtype))
        weights, state = get_state_dict(model, opt, options=options)
        twin, fresh = make(game, dtype, seed=9)
        set_state_dict(twin, fresh, model_state_dict=weights, optim_state_dict=state, options=options)
        assert_same_future((twin, fresh), (model, opt))


@pytest.mark.parametrize("game", [*GAMES, {"feedback": "off"}], ids=name_of)
def test_to_ask_an_unused_optimizer_for_its_state_changes_nothing(game: dict[str, Any]) -> None:
    """It is asked by way of a step with gradients and rates of zero, which leaves clocks and statistics at nothing."""
    (model, opt), (twin, fresh) = make(game, torch.float64), make(game, torch.float64)
    assert any(get_optimizer_state_dict(model, opt)["state"].values())
    assert_identical(values(model), values(twin))
    assert all(p.grad is None for p in model.parameters())
    data = batches(4)
    assert train(model, opt, data) == train(twin, fresh, data)
    assert_identical(values(model), values(twin))
    for ours, theirs in zip(state_of(opt), state_of(fresh), strict=True):
        assert_identical({k: ours[k] for k in theirs}, theirs)


def test_a_first_step_with_a_rate_of_zero_is_a_step() -> None:
    """A warm-up that begins at zero: statistics are taken from the first batch on."""
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.0, model=model)
    train(model, opt, batches(1))
    assert all(float(state["step"]) == 1.0 for state in state_of(opt))
    assert all(state["second_moment"].any() for state in state_of(opt))

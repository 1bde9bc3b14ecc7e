"""N + M steps are N, save, load, M: bit for bit, in every game."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from tests.toys import GAMES, SOME_GAMES, assert_identical, batches, mlp, name_of, state_of, train, values
from torch import Tensor, nn

from ocnopt import OCNOpt


def through_a_file(what: Any) -> Any:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(model: nn.Module, opt: OCNOpt, fresh: nn.Module, **options: Any) -> OCNOpt:
    fresh.load_state_dict(through_a_file(model.state_dict()))
    opt2 = OCNOpt(fresh.parameters(), model=fresh, **options)
    opt2.load_state_dict(through_a_file(opt.state_dict()))
    return opt2


OPTIONS = {"lr": 0.05, "weight_decay": 0.01, "refresh_every": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("game", [*GAMES, {"feedback": "off"}], ids=name_of)
def test_resumed_training_is_the_same_training(game: dict[str, Any], dtype: torch.dtype) -> None:
    model = mlp(dtype=dtype)
    opt = OCNOpt(model.parameters(), model=model, **OPTIONS, **game)
    train(model, opt, batches(3, dtype=dtype))
    twin = mlp(dtype=dtype, seed=9)
    opt2 = resumed(model, opt, twin)  # every argument comes back from the file
    assert opt2.param_groups[0]["lr"] == 0.05
    assert_identical(state_of(opt2), state_of(opt))
    more = batches(3, dtype=dtype, seed=8)
    assert train(model, opt, more) == train(twin, opt2, more)
    assert_identical(values(twin), values(model))
    assert_identical(state_of(opt2), state_of(opt))


def test_state_of_half_precision_weights_is_single_precision() -> None:
    model = mlp(dtype=torch.bfloat16)
    opt = OCNOpt(model.parameters(), model=model, curvature="kronecker", rank=2)
    train(model, opt, batches(2, dtype=torch.bfloat16))
    opt2 = resumed(model, opt, mlp(dtype=torch.bfloat16))
    for state in state_of(opt2):
        tensors = [v for v in state.values() if isinstance(v, Tensor)]
        assert tensors
        assert all(t.dtype == torch.float32 for t in tensors)


def test_loaded_state_is_a_copy() -> None:
    """Two optimizers that load one dictionary share nothing, and the dictionary stays as it was."""
    model, twin = mlp(), mlp()
    opt = OCNOpt(model.parameters())
    train(model, opt, batches(2))
    saved = opt.state_dict()
    opt2 = OCNOpt(twin.parameters())
    opt2.load_state_dict(saved)
    before = state_of(opt2)
    train(model, opt, batches(2))
    assert_identical(state_of(opt2), before)


@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_parameters_of_different_age(game: dict[str, Any]) -> None:
    """Clocks that ran together still do, and those apart still are."""
    runs = []
    for resume in (False, True):
        model = mlp()
        opt = OCNOpt(model[:2].parameters(), model=model, **OPTIONS, **game)
        train(model, opt, batches(2))
        opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.01})
        train(model, opt, batches(1))
        if resume:
            saved = through_a_file(opt.state_dict())
            opt.detach()
            groups = [{"params": list(model[:2].parameters())}, {"params": list(model[2].parameters())}]
            opt = OCNOpt(groups, model=model)
            opt.load_state_dict(saved)
        train(model, opt, batches(3))
        runs.append((values(model), state_of(opt)))
    assert_identical(*runs)
    ages = {float(state["step"]) for state in runs[0][1]}
    assert ages == {6.0, 4.0}


def test_an_unused_optimizer_and_a_fresh_one() -> None:
    model = mlp()
    opt, opt2 = OCNOpt(model.parameters()), OCNOpt(model.parameters(), lr=0.5)
    opt2.load_state_dict(opt.state_dict())
    assert opt2.param_groups[0]["lr"] == 0.01
    train(model, opt2, batches(2))


def test_another_number_of_parameters_is_refused() -> None:
    opt, opt2 = OCNOpt(mlp().parameters()), OCNOpt(mlp(depth=2).parameters())
    with pytest.raises(ValueError, match="doesn't match the size"):
        opt2.load_state_dict(opt.state_dict())


def test_the_checkpoint_of_another_optimizer_is_refused() -> None:
    model = mlp()
    adam = torch.optim.Adam(model.parameters())
    train(model, adam, batches(1))
    opt = OCNOpt(model.parameters())
    before = opt.state_dict()
    with pytest.raises(ValueError, match="the checkpoint is of another optimizer than OCNOpt"):
        opt.load_state_dict(adam.state_dict())
    assert opt.state_dict() == before


def test_the_checkpoint_of_another_network_is_refused() -> None:
    model, other = mlp(), mlp(width=7)
    saved = OCNOpt(other.parameters())
    train(other, saved, batches(1))
    opt = OCNOpt(model.parameters())
    with pytest.raises(ValueError, match=r"momentum of parameter 0 has shape \(7, 5\), the parameter \(4, 5\)"):
        opt.load_state_dict(saved.state_dict())
    assert not opt.state

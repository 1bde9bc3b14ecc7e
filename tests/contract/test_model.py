"""attach, detach, add_param_group, copies: what holds on to the model and what does not."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from tests.toys import SOME_GAMES, assert_identical, batches, differ, hooks_on, mlp, name_of, train, values
from torch import nn

from ocnopt import OCNOpt

games = pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)


@games
def test_hooks_come_and_go(game: dict[str, Any]) -> None:
    model = mlp()
    for module in model.modules():  # hooks of others stay
        module.register_forward_hook(lambda *_: None)
    before = hooks_on(model)
    opt = OCNOpt(model.parameters(), model=model, **game)
    watched = hooks_on(model)
    assert (watched > before) == (game["curvature"] == "kronecker" or game != SOME_GAMES[0])
    opt.attach(model)
    assert hooks_on(model) == watched, "attached twice, hooked once"
    opt.detach()
    assert hooks_on(model) == before


def test_attach_to_another_model() -> None:
    params = list(mlp().parameters())
    first, second = (nn.ModuleList([nn.ParameterList(params)]) for _ in range(2))
    opt = OCNOpt(params, model=first, rank=2)
    opt.attach(second)
    assert hooks_on(first) == 0
    assert hooks_on(second) > 0
    with pytest.raises(ValueError, match="holds none"):
        opt.attach(mlp())
    assert hooks_on(second) > 0, "a refused model changes nothing"


def test_detached_means_without_a_model() -> None:
    """Rank 1 and linear feedback go on without the model, to the same steps in consistent mode."""
    found = []
    for detach in (False, True):
        model = mlp()
        opt = OCNOpt(model.parameters(), model=model)
        if detach:
            opt.detach()
        train(model, opt, batches(4))
        found.append(values(model))
    torch.testing.assert_close(*found)


@games
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_step_alike(game: dict[str, Any], way: str) -> None:
    """Model and optimizer copied together go on as the originals do, once the copy is attached."""
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, refresh_every=2, **game)
    train(model, opt, batches(3))
    again = lambda pair: pickle.loads(pickle.dumps(pair)) if way == "pickle" else copy.deepcopy(pair)  # noqa: E731
    model2, opt2 = again((model, opt))
    assert opt2.param_groups[0]["params"][0] is next(model2.parameters())
    opt2.attach(model2)
    assert_identical(train(model, opt, batches(3, seed=2)), train(model2, opt2, batches(3, seed=2)))
    assert_identical(values(model), values(model2))


@games
@pytest.mark.parametrize("way", ["deepcopy", "torch.save"])
def test_a_copy_of_the_model_is_its_own(game: dict[str, Any], way: str) -> None:
    """An EMA or target network, made while the model is attached, must not write on the optimizer's tape."""
    runs = []
    for with_copy in (False, True):
        model = mlp()
        opt = OCNOpt(model.parameters(), model=model, **game)
        train(model, opt, batches(1))
        if with_copy:
            twin = copy.deepcopy(model) if way == "deepcopy" else saved_and_loaded(model)
            side = torch.optim.SGD(twin.parameters(), lr=0.1)
        for x, y in batches(3, seed=5):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if with_copy:
                train(twin, side, batches(2, size=4, seed=7))
            opt.step()
        runs.append(values(model))
    assert_identical(*runs)
    assert differ(values(twin), values(model))


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_copied_model_does_not_copy_the_optimizer() -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, rank=2)
    memo: dict[int, Any] = {}
    copy.deepcopy(model, memo)
    assert id(opt) not in memo


def test_repr_shows_the_arguments() -> None:
    text = repr(OCNOpt(mlp().parameters(), lr=0.25, gauss_newton=0.5))
    assert text.startswith("OCNOpt")
    assert "lr: 0.25" in text
    assert "gauss_newton: 0.5" in text


def test_a_new_group_may_need_hooks() -> None:
    model = mlp()
    opt = OCNOpt(model[:2].parameters(), model=model)
    assert hooks_on(model) == 0
    opt.add_param_group({"params": list(model[2].parameters()), "curvature": "kronecker"})
    train(model, opt, batches(2))


def test_a_new_group_joins_the_game() -> None:
    model = mlp()
    head = list(model[-1].parameters())
    opt = OCNOpt(list(model[0].parameters()) + list(model[1].parameters()), model=model, rank=3, feedback="nonlinear")
    train(model, opt, batches(2))
    before = [p.detach().clone() for p in head]
    opt.add_param_group({"params": head, "lr": 0.5, "curvature": "kronecker"})
    train(model, opt, batches(1))
    assert differ(head, before)
    assert "kronecker" in opt.summary()
    assert [layer.name for layer in opt.diagnostics.layers] == ["0.0", "1.0", "2"]


@pytest.mark.parametrize(
    ("group", "error"),
    [
        ({"lr": -1.0}, "lr"),
        ({"rank": 2}, "rank"),
        ({"momentum": "much"}, "momentum"),
        ({"params": "same"}, "more than one"),
    ],
)
def test_a_bad_group_changes_nothing(group: dict[str, Any], error: str) -> None:
    model = mlp()
    body, head = list(model[:2].parameters()), list(model[-1].parameters())
    opt = OCNOpt(body)
    bad = {"params": body if group.get("params") else head, **{k: v for k, v in group.items() if k != "params"}}
    with pytest.raises(ValueError, match=error):
        opt.add_param_group(bad)
    assert len(opt.param_groups) == 1
    train(model, opt, batches(2))
    opt.add_param_group({"params": head})
    train(model, opt, batches(2))

"""A step with a loss or gradient that is not finite did not happen: no trace, but a count and a warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.toys import GAMES, SOME_GAMES, assert_identical, backward, batches, mlp, name_of, state_of, train, values
from torch import Tensor, nn

from ocnopt import OCNOpt, whole_step

OPTIONS = {"lr": 0.05, "weight_decay": 0.01, "refresh_every": 3}
BAD = {"nan": float("nan"), "inf": float("inf")}


def clean(state: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How long ago a basis was made may be counted on the host, without asking the device whether a step counted."""
    return [{k: v for k, v in s.items() if k != "since_refresh"} for s in state]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("when", [0, 4, 5])
@pytest.mark.parametrize(
    "game", [*GAMES, {"feedback": "off"}, {"feedback": "off", "curvature": "kronecker"}], ids=name_of
)
def test_as_if_it_had_not_been(game: dict[str, Any], when: int, bad: str) -> None:
    runs = []
    for spoiled in (False, True):
        model = mlp()
        opt = OCNOpt(model.parameters(), model=model, **OPTIONS, **game)
        for i, (x, y) in enumerate(batches(8)):
            if spoiled and i == when:
                rotten = x.clone()
                rotten[1, 2] = BAD[bad]
                before, state = values(model), state_of(opt)
                train(model, opt, [(rotten, y)])
                assert_identical(values(model), before)
                if i:
                    assert_identical(clean(state_of(opt)), clean(state))
            train(model, opt, [(x, y)])
        runs.append((values(model), clean(state_of(opt))))
        if spoiled:
            with pytest.warns(UserWarning, match=r"1 step\(s\) skipped: the gradient of"):
                assert opt.diagnostics.skipped_steps == 1
        else:
            assert opt.diagnostics.skipped_steps == 0
    assert_identical(*runs)


@pytest.mark.parametrize("bad", BAD)
def test_where_one_may_not_look(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(whole_step, "may_look", lambda t: False)
    test_as_if_it_had_not_been({"curvature": "kronecker"}, 4, bad)


@pytest.mark.parametrize("options", [{"eps": 0.0}, {"curvature": "kronecker", "damping": 0.0}], ids=str)
@pytest.mark.parametrize("feedback", ["off", "linear", "nonlinear"])
def test_also_where_nothing_keeps_zeros_from_being_divided_by(options: dict[str, Any], feedback: str) -> None:
    model, (x, y) = mlp(), batches()[0]
    opt = OCNOpt(model.parameters(), model=model, feedback=feedback, **options)
    before = values(model)
    train(model, opt, [(x * float("nan"), y)])
    assert_identical(values(model), before)


@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_the_warning_names_the_first_bad_layer(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, **game)
    for index, name in ((2, "1.0"), (4, "2")):
        opt.zero_grad()
        backward(model, *batches()[0])
        list(model.parameters())[index].grad[0, 0] = float("nan")
        list(model.parameters())[-1].grad[0] = float("inf")
        opt.step()
        with pytest.warns(UserWarning, match=rf"1 step\(s\) skipped: the gradient of '{name}") as caught:
            _ = opt.diagnostics
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _ = opt.diagnostics  # said once
    assert opt.diagnostics.skipped_steps == 2


@pytest.mark.parametrize("as_number", [False, True])
@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_a_loss_alone_is_enough(game: dict[str, Any], as_number: bool) -> None:
    """Gradients may be finite where the loss is not; a closure tells."""
    model, (x, y) = mlp(), batches()[0]
    opt = OCNOpt(model.parameters(), model=model, **game)

    def closure() -> Any:
        opt.zero_grad()
        loss = backward(model, x, y) + float("inf")
        return loss.item() if as_number else loss

    before = values(model)
    opt.step(closure)
    assert_identical(values(model), before)
    with pytest.warns(UserWarning, match="skipped: the loss was not finite"):
        assert opt.diagnostics.skipped_steps == 1


@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_many_bad_steps_are_counted_without_being_looked_at(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), model=model, **game)
    good, bad = batches(1), [(batches()[0][0] * float("nan"), batches()[0][1])]
    train(model, opt, good + bad * 3 + good + bad)
    with pytest.warns(UserWarning, match=r"4 step\(s\) skipped"):
        assert opt.diagnostics.skipped_steps == 4
    train(model, opt, good)
    assert opt.diagnostics.skipped_steps == 4


@pytest.mark.parametrize("game", GAMES, ids=name_of)
def test_gradients_that_somebody_repaired(game: dict[str, Any]) -> None:
    """``p.grad`` is made finite by hand, but the adjoints of single samples are not: still no trace."""
    model, (x, y) = mlp(), batches()[0]
    opt = OCNOpt(model.parameters(), model=model, **OPTIONS, **game)
    train(model, opt, batches(2))
    rotten = x.clone()
    rotten[1, 2] = float("nan")
    opt.zero_grad()
    backward(model, rotten, y)
    for p in model.parameters():
        p.grad.nan_to_num_()
    opt.step()
    train(model, opt, batches(2))
    assert all(t.isfinite().all() for t in values(model))
    for state in state_of(opt):
        assert all(v.isfinite().all() for v in state.values() if isinstance(v, Tensor))


@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_huge_but_finite(game: dict[str, Any]) -> None:
    """Kernels overflow long before gradients do; then the step is zero, not NaN."""
    model = mlp(dtype=torch.float32)
    opt = OCNOpt(model.parameters(), model=model, **game)
    x, y = batches(dtype=torch.float32)[0]
    train(model, opt, [(x, y)])
    opt.zero_grad()
    (nn.functional.cross_entropy(model(x), y) * 1e30).backward()
    opt.step()
    assert all(t.isfinite().all() for t in values(model))

"""Options that need more of a forward pass than it kept, set after it: one clear sentence, then a step like any."""

from __future__ import annotations

from typing import Any

import pytest
from tests.toys import assert_identical, backward, batches, mlp, name_of, state_of, train, values

from ocnopt import OCNOpt

AFTER = "was asked for after the forward pass: run forward and backward again"
#: the order of calls alone is no record of a pass
UNSEEN = (
    "needs a forward and backward pass of the attached model itself since it was asked for and since the last step; "
    "none was seen (attach the model before torch.compile, or at least before the compiled model first runs)"
)
BEFORE: list[tuple[dict[str, Any], str]] = [
    ({"rank": 1}, AFTER),
    ({"bellman": "paper"}, UNSEEN),
    ({"rank": 2}, AFTER),
    ({"curvature": "kronecker"}, AFTER),
    ({"curvature": "kronecker", "rank": "full", "bellman": "paper"}, AFTER),
]


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(("game", "sentence"), BEFORE, ids=lambda v: name_of(v) if isinstance(v, dict) else "")
def test_nonlinear_between_forward_and_step(game: dict[str, Any], sentence: str, started: bool) -> None:
    model, (x, y) = mlp(), batches()[0]
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    if started:
        train(model, opt, batches(2))
        opt.zero_grad()
    backward(model, x, y)
    before, state = values(model), state_of(opt)
    opt.param_groups[0]["feedback"] = "nonlinear"
    with pytest.raises(RuntimeError) as caught:
        opt.step()
    assert str(caught.value) == f"feedback='nonlinear' {sentence}"
    assert_identical(values(model), before)
    assert_identical(state_of(opt), state)
    assert len(train(model, opt, batches(2))) == 2
    assert opt.diagnostics.measured_s is not None
    assert all(t.isfinite().all() for t in values(model))


def test_the_other_way_round_asks_for_less_and_is_a_step() -> None:
    model, (x, y) = mlp(), batches()[0]
    opt = OCNOpt(model.parameters(), 0.05, model=model, feedback="nonlinear")
    backward(model, x, y)
    opt.param_groups[0]["feedback"] = "linear"
    opt.step()
    other = mlp()
    train(other, OCNOpt(other.parameters(), 0.05, model=other), [(x, y)])
    assert_identical(values(model), values(other))

"""A checkpoint of a version that did not know all of today's options loads; the rest is as this optimizer has it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.needs.checkpoints.write import GAMES_OF, go_on, make
from tests.toys import SOME_GAMES, assert_identical, batches, mlp, name_of, state_of, train, values

from ocnopt import OCNOpt

#: checkpoints that versions of the past wrote, by :func:`tests.needs.checkpoints.write.main`
WRITTEN = sorted((Path(__file__).parent / "checkpoints").glob("*.pt"))
#: after how many steps this version goes another way than the old one, on purpose: eigenbases that are due at the
#: first of these steps now serve from the second on
SAME = {("0.1.0", "kronecker"): 2}
OPTIONS = [o for o in OCNOpt(mlp().parameters()).defaults if o != "lr"]  # no optimizer was ever without a rate


def old(opt: OCNOpt, *options: str) -> dict[str, Any]:
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        for option in options:
            del group[option]
    return saved


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_has_a_default(option: str) -> None:
    model, other = mlp(), mlp()
    opt = OCNOpt(model.parameters(), 0.05, model=model)
    train(model, opt, batches(2))
    other.load_state_dict(model.state_dict())
    new = OCNOpt(other.parameters(), model=other)
    new.load_state_dict(old(opt, option))
    assert all(group[option] == new.defaults[option] for group in new.param_groups)
    assert new.param_groups[0]["lr"] == 0.05
    train(model, opt, batches(2))
    train(other, new, batches(2))
    assert_identical(values(model), values(other))
    assert_identical(state_of(opt), state_of(new))


@pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)
def test_the_default_is_what_this_optimizer_was_made_with(game: dict[str, Any]) -> None:
    """Several groups, several options at once."""
    runs = []
    for lost in ([], ["clamp", "ekfac", "decay"]):
        model = mlp()
        groups = [{"params": list(model[:2].parameters())}, {"params": list(model[2].parameters()), "lr": 0.02}]
        opt = OCNOpt(groups, 0.05, model=model, clamp=False, ekfac=False, decay=0.5, **game)
        train(model, opt, batches(2))
        opt.load_state_dict(old(opt, *lost))
        train(model, opt, batches(2))
        assert [g["clamp"] for g in opt.param_groups] == [False, False]
        assert [g["lr"] for g in opt.param_groups] == [0.05, 0.02]
        runs.append((values(model), state_of(opt)))
    assert_identical(*runs)


@pytest.mark.parametrize("name", GAMES_OF)
@pytest.mark.parametrize("file", WRITTEN, ids=lambda file: file.stem)
def test_what_a_version_of_the_past_wrote_goes_on(file: Path, name: str) -> None:
    """The state is all there, and the steps are those that the version itself went on with, to rounding."""
    saved = torch.load(file, weights_only=True)
    if name not in saved["runs"]:
        pytest.skip(f"version {saved['version']} did not know it")
    before = saved["runs"][name]
    assert before["state"]["version"] == saved["version"] == file.stem
    model, opt = make(name)
    model.load_state_dict(before["weights"])
    opt.load_state_dict(before["state"])
    for p, theirs in zip(opt.param_groups[0]["params"], before["state"]["state"].values(), strict=True):
        assert opt.state[p].keys() == theirs.keys()
    losses = go_on(model, opt)
    same = SAME.get((file.stem, GAMES_OF[name].get("curvature")), len(losses))
    assert losses[:same] == pytest.approx(before["losses"][:same], rel=1e-6)
    if same < len(losses):
        assert losses == pytest.approx(before["losses"], rel=0.05)
        return
    torch.testing.assert_close(model.state_dict(), before["end"], rtol=1e-5, atol=1e-8)


def test_there_is_one() -> None:
    assert WRITTEN


def test_an_option_it_has_is_kept() -> None:
    model, other = mlp(), mlp()
    new = OCNOpt(other.parameters())
    new.load_state_dict(old(OCNOpt(model.parameters(), clamp=False, gauss_newton=0.3), "decay"))
    assert (new.param_groups[0]["clamp"], new.param_groups[0]["gauss_newton"]) == (False, 0.3)


def test_a_pickle_of_a_version_that_knew_less() -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.05)
    train(model, opt, batches(2))
    for known in (opt.defaults, *opt.param_groups):
        del known["fused"]
    again, new = pickle.loads(pickle.dumps((model, opt)))
    assert new.param_groups[0]["fused"] is None
    train(again, new, batches(2))
    new.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})

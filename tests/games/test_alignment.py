"""When a branch acts: fixed, random, adaptive; for one block or for all; and what is refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.exact.nets import seeded
from tests.games import markov
from tests.toys import assert_identical, values
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt
from ocnopt.games import UCB1, Alignment

B = 6


class Blocks(nn.Module):
    """Two residual blocks; the first branch can be late by two stages, the second, of two layers, by one."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(5, 4), nn.Linear(4, markov.CLASSES)
        self.one = nn.ModuleDict({"path": self.path(3), "skip": nn.Linear(4, 4)})
        self.two = nn.ModuleDict({"path": self.path(3), "skip": self.path(2)})

    @staticmethod
    def path(count: int) -> nn.Sequential:
        return nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(4, 4), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.into(x))
        for block in (self.one, self.two):
            z = block["path"](z) + block["skip"](z)
        return self.head(z)


def make(**options: Any) -> tuple[nn.Module, OCNOpt]:
    with seeded(0):
        model = Blocks().double()
    return model, OCNOpt(model.parameters(), 0.05, model=model, feedback="nonlinear", **options)


def step(model: nn.Module, opt: OCNOpt, seed: int = 1) -> None:
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(B, 5, generator=g, dtype=torch.float64), torch.randint(markov.CLASSES, (B,), generator=g)
    opt.zero_grad()
    cross_entropy(model(x), y).backward()
    opt.step()


CASES: list[tuple[Any, dict[str, int]]] = [
    ("first", {"one.skip": 0, "two.skip": 0}),
    ("last", {"one.skip": 2, "two.skip": 1}),
    (1, {"one.skip": 1, "two.skip": 1}),
    ({"one": 2}, {"one.skip": 2, "two.skip": 0}),
    ({"one": "last", "two.skip": 1}, {"one.skip": 2, "two.skip": 1}),
    ({"": "last", "one": 1}, {"one.skip": 1, "two.skip": 1}),
]


@pytest.mark.parametrize(("alignment", "late"), CASES, ids=[str(a) for a, _ in CASES])
def test_fixed(alignment: Any, late: dict[str, int]) -> None:
    model, opt = make(alignment=alignment)
    step(model, opt)
    assert {b.name: b.slack for b in opt.game.branches} == {"one.skip": 2, "two.skip": 1}
    assert opt.game.late == late
    stage = {layer.name: layer.stage for layer in opt.diagnostics.layers}
    assert stage["one.skip"] == 1 + late["one.skip"]
    assert (stage["two.skip.0"], stage["two.skip.2"]) == (4 + late["two.skip"], 5 + late["two.skip"])


def test_another_alignment_is_another_update() -> None:
    found = []
    for alignment in ("first", 1, "last"):
        model, opt = make(alignment=alignment)
        step(model, opt)
        found.append(torch.cat([p.flatten() for p in values(model)]))
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


REFUSED = [
    (2, r"^alignment=2 is not possible for 'two\.skip': it can be late by at most 1 \(stages 4 to 5\)"),
    ({"two": 2}, r"^alignment=2 is not possible for 'two\.skip'"),
    ({"three": 1}, r"^alignment names 'three', .* 'one\.skip', 'two\.skip'"),
    ({"on": 1}, r"^alignment names 'on'"),
]


@pytest.mark.parametrize(("alignment", "message"), REFUSED, ids=[str(a) for a, _ in REFUSED])
def test_what_the_data_flow_forbids_is_refused_by_name(alignment: Any, message: str) -> None:
    model, opt = make(alignment=alignment)
    before = [p.clone() for p in values(model)]
    with pytest.raises(ValueError, match=message):
        step(model, opt)
    assert_identical(values(model), before)
    assert not any(opt.state.values())


def test_random_is_repeatable_and_leaves_the_random_numbers_alone() -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        model, opt = make(alignment="random")
        chosen = []
        for i in range(12):
            step(model, opt, i)
            chosen.append(opt.game.late["one.skip"])
        runs.append((chosen, torch.rand(1)))
    assert runs[0] == runs[1]
    assert set(runs[0][0]) == {0, 1, 2}
    torch.manual_seed(5)
    assert torch.rand(1) == runs[0][1]


def test_adaptive_stays_with_its_choice_until_it_is_rewarded() -> None:
    model, opt = make(alignment="adaptive")
    with pytest.raises(RuntimeError, match="no adaptive alignment has been played"):
        opt.game.reward(0.5)
    chosen = []
    for i in range(30):
        step(model, opt, i)
        chosen.append(opt.game.late["one.skip"])
        if i % 3 == 2:
            opt.game.reward(0.5)
    assert all(len(set(chosen[i : i + 3])) == 1 for i in range(0, 30, 3))
    assert len(set(chosen)) == 3
    assert opt.game.bandits[""].rounds == 10
    step(model, opt)
    with pytest.raises(ValueError, match=r"reward must be a number in \[0, 1\]"):
        opt.game.reward(1.5)


def test_adaptive_learns_which_alignment_pays() -> None:
    """A reward that is 1 for one arm of one block and 0 for all else."""
    late: dict[str, int] = {}

    def reward() -> float:
        late.update(opt.game.late)
        return float(late["one.skip"] == 1)

    model, opt = make(alignment={"one": Alignment.adaptive(reward, every=2), "two": "last"})
    for i in range(240):
        step(model, opt, i)
    bandit = opt.game.bandits["one"]
    assert bandit.rounds == 120
    assert bandit.probabilities[1] > 0.6
    assert late["two.skip"] == 1


@pytest.mark.parametrize("alignment", ["random", "adaptive", {"one": "adaptive", "two": "random"}], ids=str)
def test_a_checkpoint_goes_on_with_the_same_choices(alignment: Any, tmp_path: Any) -> None:
    def run(model: nn.Module, opt: OCNOpt, steps: range) -> list[dict[str, int]]:
        chosen = []
        for i in steps:
            step(model, opt, i)
            chosen.append(opt.game.late)
            if "adaptive" in str(alignment) and i % 2:
                opt.game.reward(0.3 + 0.1 * (i % 5))
        return chosen

    model, opt = make(alignment=alignment)
    run(model, opt, range(9))
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, tmp_path / "kept.pt")
    ahead = run(model, opt, range(9, 25))
    kept = torch.load(tmp_path / "kept.pt", weights_only=True)
    torch.manual_seed(99)
    twin, its = make(alignment=alignment)
    twin.load_state_dict(kept["model"])
    its.load_state_dict(kept["opt"])
    assert run(twin, its, range(9, 25)) == ahead
    assert_identical(values(model), values(twin))


def test_a_rule_of_ones_own_survives_loading() -> None:
    rule = Alignment.adaptive(lambda: 0.5, bandit=UCB1)
    model, opt = make(alignment={"one": rule})
    step(model, opt)
    twin, its = make(alignment={"one": rule})
    its.load_state_dict(opt.state_dict())
    assert its.param_groups[0]["alignment"]["one"] is rule
    step(twin, its)
    assert isinstance(its.game.bandits["one"], UCB1)


@pytest.mark.parametrize("wrong", [{"reward": 0.5}, {"every": 0}, {"every": 1.5}, {"every": "a"}])
def test_wrong_arguments_of_adaptive(wrong: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(wrong))} must be"):
        Alignment.adaptive(**wrong)


@pytest.mark.parametrize("wrong", ["frist", -3, True, 1.0, None])
def test_wrong_rules(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^rule must be"):
        Alignment(wrong)


# --- the state of bandits ---


def play(model: nn.Module, opt: OCNOpt, rounds: int) -> None:
    for i in range(rounds):
        step(model, opt, i)
        opt.game.reward(0.4)


def test_a_reward_may_come_right_after_loading() -> None:
    model, opt = make(alignment="adaptive")
    play(model, opt, 3)
    step(model, opt)
    _, its = make(alignment="adaptive")
    its.load_state_dict(opt.state_dict())
    for each in (opt, its):
        each.game.reward(0.9)
    assert its.game.bandits[""].state_dict() == opt.game.bandits[""].state_dict()
    assert its.game.bandits[""].rounds == 4


@pytest.mark.parametrize("how", ["attach", "copy", "pickle"])
def test_bandits_survive(how: str) -> None:
    model, opt = make(alignment="adaptive")
    play(model, opt, 3)
    if how == "attach":
        opt.detach()
    else:
        opt = copy.deepcopy(opt) if how == "copy" else pickle.loads(pickle.dumps(opt))
        model.load_state_dict(model.state_dict())
        opt.param_groups[0]["params"] = list(model.parameters())
        opt.state.clear()
    opt.attach(model)
    play(model, opt, 2)
    assert opt.game.bandits[""].rounds == 5


def test_a_reward_is_for_those_that_have_none_of_their_own() -> None:
    rules = {"one": Alignment.adaptive(lambda: 0.25, every=10), "two": "adaptive"}
    model, opt = make(alignment=rules)
    step(model, opt)
    opt.game.reward(0.75)
    assert (opt.game.bandits["one"].rounds, opt.game.bandits["two"].rounds) == (0, 1)


def test_a_refused_step_is_no_round() -> None:
    model, opt = make(alignment={"one": "adaptive", "two": 9})
    with pytest.raises(ValueError, match="alignment=9"):
        step(model, opt)
    with pytest.raises(RuntimeError, match="no adaptive alignment has been played"):
        opt.game.reward(0.5)


class Early(Blocks):
    """Leaves the second block out when told so."""

    deep = True

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.into(x))
        for block in (self.one, self.two)[: 2 if self.deep else 1]:
            z = block["path"](z) + block["skip"](z)
        return self.head(z)


@pytest.mark.filterwarnings("ignore:.*its calls were not seen")
def test_a_block_that_is_left_out_now_and_then() -> None:
    with seeded(0):
        model = Early().double()
    opt = OCNOpt(
        model.parameters(), 0.05, model=model, feedback="nonlinear", alignment={"one": "adaptive", "two": "last"}
    )
    for i in range(6):
        model.deep = i % 2 == 0
        step(model, opt, i)
        assert opt.game.late == {"one.skip": opt.game.late["one.skip"], **({"two.skip": 1} if model.deep else {})}
        opt.game.reward(0.5)
    assert opt.game.bandits["one"].rounds == 6


class Dropping(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.2))


@pytest.mark.parametrize("alignment", ["last", "adaptive", "random"])
def test_with_dropout_from_the_first_step_on(alignment: str) -> None:
    with seeded(0):
        model = Dropping().double()
    opt = OCNOpt(model.parameters(), 0.05, model=model, feedback="nonlinear", alignment=alignment)
    step(model, opt)
    assert opt.game.why_accumulated is None


class Sharing(nn.Module):
    """One skip connection for two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.head, self.skip = nn.Linear(5, 4), nn.Linear(4, markov.CLASSES), nn.Linear(4, 4)
        self.paths = nn.ModuleList([Blocks.path(2), Blocks.path(2)])

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.into(x))
        for path in self.paths:
            z = path(z) + self.skip(z)
        return self.head(z)


def test_a_skip_connection_of_two_blocks() -> None:
    with seeded(0):
        model = Sharing().double()
    opt = OCNOpt(model.parameters(), 0.05, model=model, feedback="nonlinear", alignment={"skip": "last"})
    step(model, opt)
    assert opt.game.late == {"skip": 1, "skip#2": 1}


# --- where there is nothing to choose ---


def test_in_a_chain_nothing_can_be_late() -> None:
    model = Blocks.path(3).double()
    opt = OCNOpt(model.parameters(), 0.05, model=model, feedback="nonlinear", alignment=2)
    model(torch.randn(B, 4, dtype=torch.float64)).square().mean().backward()
    with pytest.raises(ValueError, match="alignment=2 is not possible: no branch of this network can be late"):
        opt.step()


def test_where_it_has_no_effect_it_is_said() -> None:
    with pytest.warns(UserWarning, match="alignment='last' has no effect with feedback='linear'"):
        OCNOpt(Blocks().parameters(), alignment="last")
    with pytest.raises(ValueError, match="alignment='last' needs the network"):
        OCNOpt(Blocks().parameters(), alignment="last", bellman="paper")


def test_trace_shows_the_alignment_that_is_set() -> None:
    _model, opt = make(alignment="last")
    assert opt.game.trace(torch.randn(2, 5, dtype=torch.float64)).late == {"one.skip": 2, "two.skip": 1}

"""The parts of a step are told by name, in order and properly nested, to whoever listens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import batches, mlp
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt, phases
from ocnopt.baselines import EKFAC


class Journal:
    """Paths of nested phases, in the order in which they begin."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.paths: list[tuple[str, ...]] = []

    def begin(self, name: str) -> None:
        self.open.append(name)
        self.paths.append(tuple(self.open))

    def end(self, name: str) -> None:
        assert self.open.pop() == name


def one_step(opt_of: Any = OCNOpt, **options: Any) -> Journal:
    model, ((x, y),) = mlp(), batches(1)
    opt, journal = opt_of(model.parameters(), model=model, **options), Journal()
    cross_entropy(model(x), y).backward()
    with phases.told(journal):
        opt.step()
    assert not journal.open
    return journal


@pytest.mark.parametrize("curvature", ["identity", "adaptive", "kronecker"])
@pytest.mark.parametrize("bellman", ["consistent", "paper"])
@pytest.mark.parametrize(
    ("feedback", "inside"),
    [
        ("linear", ("rollout", "update")),
        ("nonlinear", ("rollout", "bellman")),
        ("nonlinear", ("rollout", "update")),
    ],
)
def test_a_step_of_the_game(curvature: str, bellman: str, feedback: str, inside: tuple[str, ...]) -> None:
    paths = one_step(curvature=curvature, bellman=bellman, feedback=feedback, rank=2).paths
    assert [path[0] for path in paths if len(path) == 1] == ["gradients", "bellman", "rollout", "update"]
    assert ("bellman", "curvature") in paths
    assert inside in paths


def test_without_a_game_there_are_gradients_curvature_and_update() -> None:
    assert one_step(feedback="off").paths == [("gradients",), ("curvature",), ("update",), ("update",)]


def test_the_baseline_with_curvature() -> None:
    paths = one_step(EKFAC, lr=0.1).paths
    assert ("update", "curvature") in paths
    assert set(paths) == {("update",), ("update", "curvature")}


def test_phases_end_where_a_step_raises() -> None:
    journal = Journal()
    with phases.told(journal), pytest.raises(ZeroDivisionError), phases.ROLLOUT, phases.UPDATE:
        _ = 1 / 0
    assert journal.paths == [("rollout",), ("rollout", "update")]
    assert not journal.open


def test_nobody_is_told_after_the_block_and_an_outer_listener_only_outside_an_inner_one() -> None:
    outer, inner = Journal(), Journal()
    with phases.told(outer):
        with phases.told(inner), phases.BELLMAN:
            pass
        with phases.UPDATE:
            pass
    with phases.ROLLOUT:
        pass
    assert outer.paths == [("update",)]
    assert inner.paths == [("bellman",)]


def test_listening_changes_no_number() -> None:
    def trained(listening: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = mlp()
        opt = OCNOpt(model.parameters(), model=model, feedback="nonlinear", rank=2)
        for x, y in batches(3):
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            if listening:
                with phases.told(Journal()):
                    opt.step()
            else:
                opt.step()
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))

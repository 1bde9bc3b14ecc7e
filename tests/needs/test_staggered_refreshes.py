"""Eigendecompositions are spread over the steps: of each layer as often as was asked for, of all at once never."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.toys import assert_identical, batches, mlp, state_of, train, values
from torch import nn

from ocnopt import OCNOpt, clockwork
from ocnopt.curvature import eigen
from ocnopt.curvature.turns import stagger


def refreshes(model: nn.Module, opt: OCNOpt, count: int) -> list[list[int]]:
    """After which steps the statistics of each layer were decomposed."""
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    found: list[list[int]] = [[] for _ in weights]
    for batch in batches(count):
        train(model, opt, [batch])
        for w, steps in zip(weights, found, strict=True):
            if (at := opt.state[w]["refreshed_at"]) not in steps:
                steps.append(at)
    return found


@pytest.mark.parametrize("bellman", ["consistent", "paper"])
def test_all_at_first_then_in_turn(bellman: str) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), 1e-3, model=model, curvature="kronecker", refresh_every=6, bellman=bellman)
    found = refreshes(model, opt, 16)
    later = [steps[1] for steps in found]
    assert [steps[0] for steps in found] == [1] * len(found)
    assert len(set(later)) == len(later)
    assert max(later) == 1 + 6
    for steps in found:
        assert all(b - a == 6 for a, b in pairwise(steps[1:]))


def test_in_turn_where_looks_are_rare() -> None:
    """Once the early looks are over, and with a look in the same step."""
    model = mlp()
    opt = OCNOpt(model.parameters(), 1e-3, model=model, curvature="kronecker", refresh_every=6, factor_every=2)
    found = refreshes(model, opt, 40)
    assert all(steps[:4] == [1, 2, 3, 4] for steps in found)
    assert len({steps[-1] % 6 for steps in found}) == len(found)
    for steps in found:
        assert all(b - a == 6 for a, b in pairwise(steps[-4:]))


@pytest.mark.parametrize(("every", "unit"), [(6, 2), (7, 3), (2, 5)])
def test_all_layers_are_looked_at_in_the_same_steps(every: int, unit: int) -> None:
    """A refresh waits for the next look, so that it needs none of its own: then steps are of two kinds."""
    model = mlp()
    opt = OCNOpt(model.parameters(), 1e-3, model=model, curvature="kronecker", refresh_every=every, factor_every=unit)
    data = batches(90)
    train(model, opt, data[:50])
    looks = []
    for batch in data[50:]:
        kind = clockwork.kind(opt)
        assert len(set(kind)) == 1
        looks.append(kind[0])
        train(model, opt, [batch])
    at = [i for i, look in enumerate(looks) if look]
    assert all(b - a == unit for a, b in pairwise(at))
    assert len(at) == pytest.approx(40 / unit, abs=1)


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("before", [1, 6, 100])
def test_layers_in_step_get_out_of_it(before: int, unit: int) -> None:
    """Of a checkpoint that knows no turns, or after another ``refresh_every``."""
    model = mlp()
    opt = OCNOpt(model.parameters(), 1e-3, model=model, curvature="kronecker", refresh_every=before, factor_every=unit)
    train(model, opt, batches(40))
    weights = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    for w in weights:
        count = int(opt.state[w]["statistics"])
        opt.state[w].update(refreshed_at=count, since_refresh=0)
        opt.state[w].pop("early")
    opt.param_groups[0]["refresh_every"] = 6
    found = [steps[-4:] for steps in refreshes(model, opt, 40)]
    assert len({steps[-1] % 6 for steps in found}) == len(found)
    for steps in found:
        assert all(b - a == 6 for a, b in pairwise(steps))


@pytest.mark.parametrize(
    ("costs", "every", "unit", "expected"),
    [
        ([1.0, 8.0, 2.0], 6, 1, [4, 2, 6]),
        ([5.0, 4.0, 3.0, 3.0], 2, 1, [1, 2, 2, 1]),  # as much at each time as can be
        ([1.0, 2.0], 10, 4, [8, 4]),  # with the looks
        ([6.0, 5.0, 4.0, 3.0, 2.0], 10, 1, [2, 10, 6, 4, 8]),  # the large ones far apart
        ([1.0], 100, 1, [100]),
        ([1.0, 2.0], 1, 1, [1, 1]),
    ],
)
def test_turns(costs: list[float], every: int, unit: int, expected: list[int]) -> None:
    assert stagger(costs, every, unit) == expected


@pytest.mark.parametrize(
    ("every", "stop"), [*((3, n) for n in range(3, 7)), *((21, n) for n in range(7, 12)), (200, 70), (200, 80)]
)
def test_a_checkpoint_at_any_time_goes_on_bit_for_bit(every: int, stop: int) -> None:
    """Also one in which a basis is in the making."""

    def make() -> tuple[nn.Module, OCNOpt]:
        model = mlp()
        return model, OCNOpt(model.parameters(), 0.05, model=model, curvature="kronecker", refresh_every=every)

    (model, opt), data = make(), batches(stop + 20)
    train(model, opt, data[:stop])
    other, fresh = make()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    fresh.load_state_dict(copy.deepcopy(opt.state_dict()))
    for m, o in ((model, opt), (other, fresh)):
        train(m, o, data[stop:])
    assert_identical(values(model), values(other))
    assert_identical(state_of(opt), state_of(fresh))


def test_factors_of_one_size_are_decomposed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, whole = [], eigen.safe_eigh
    monkeypatch.setattr(eigen, "safe_eigh", lambda m: calls.append(m.shape) or whole(m))
    matrices = [(v := torch.randn(n, 4, 4).double()) @ v.mT for n in (1, 2)] + [torch.eye(3).double()[None]]
    found = eigen.decompose(matrices, eigen.World())
    assert calls == [(3, 4, 4), (1, 3, 3)]
    for matrix, pair in zip(matrices, found, strict=True):
        assert pair is not None
        values, vectors = pair
        torch.testing.assert_close(vectors @ values.diag_embed() @ vectors.mT, matrix)


def test_one_that_fails_leaves_the_others_of_its_size() -> None:
    good: Any = torch.eye(2).double()[None]
    found = eigen.decompose([good, good * torch.nan, good], eigen.World())
    assert [pair is None for pair in found] == [False, True, False]

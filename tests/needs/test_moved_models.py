"""What is known of a model from one pass to the next, and what has to be looked at each time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ocnopt.anatomy import Anatomy
from ocnopt.environment import Autocast, Buffers


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)))


def test_nothing_has_changed() -> None:
    model = network()
    known = Anatomy.of(model)
    assert Anatomy.of(model, known) is known
    assert Anatomy.of(network(), known) is not known
    assert known.modules == list(model.modules())
    assert list(map(id, known.parameters)) == list(map(id, model.parameters()))


def _replace_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def _share_parameter(model: nn.Sequential) -> None:
    model[0]._parameters["bias"] = model[1]._parameters["bias"]


def _rename_buffer(model: nn.Sequential) -> None:
    model[1]._buffers["other"] = model[1]._buffers.pop("num_batches_tracked")


@pytest.mark.parametrize(
    "change",
    [
        _replace_parameter,
        _share_parameter,
        _rename_buffer,
        lambda model: model.append(nn.ReLU()),
        lambda model: model[2].append(nn.ReLU()),
        lambda model: model.__setitem__(1, nn.BatchNorm1d(4)),
        lambda model: model.__delitem__(1),
        lambda model: model[0].register_parameter("bias", None),
        lambda model: model[0].register_buffer("more", torch.zeros(2)),
        lambda model: setattr(model[1], "running_mean", torch.zeros(4)),
        lambda model: setattr(model[0], "inside", nn.ReLU()),
    ],
)
def test_what_has_changed_is_seen(change: Callable[[nn.Sequential], None]) -> None:
    model = network()
    known = Anatomy.of(model)
    change(model)
    found = Anatomy.of(model, known)
    assert found is not known
    assert found.modules == list(model.modules())
    assert list(map(id, found.parameters)) == list(map(id, model.parameters()))
    assert [name for _, name, _ in found.buffers] == [n.rpartition(".")[2] for n, _ in model.named_buffers()]


def test_a_model_that_is_moved() -> None:
    """Its parameters are the same tensors, on another device."""
    model = nn.Sequential(nn.Linear(3, 4))
    known = Anatomy.of(model)
    assert known.places.devices == {torch.device("cpu")}
    for p in model.parameters():
        torch.utils.swap_tensors(p, nn.Parameter(torch.empty_like(p, device="meta")))
    assert Anatomy.of(model, known).places.devices == {torch.device("meta")}
    assert [device for device, _, _ in Autocast.of(Anatomy.of(network(), known)).states] == ["cpu"]


def test_buffers_are_put_back() -> None:
    model = network()
    model[0].register_buffer("matrix", torch.randn(3, 5).T)
    model[0].register_buffer("nothing", torch.zeros(0, 2))
    model[0].register_buffer("learnt", torch.ones(2, requires_grad=True))
    before = {name: b.detach().clone() for name, b in model.named_buffers()}
    kept, same = Buffers(model), dict(model.named_buffers())
    versions = {name: b._version for name, b in same.items()}
    for b in same.values():
        b.data.add_(3)
    model[1].running_mean = torch.zeros(4)
    kept.restore()
    for name, b in model.named_buffers():
        assert b is same[name]
        assert b._version == versions[name]
        assert torch.equal(b, before[name])


def test_buffers_whose_dtype_was_changed_under_them() -> None:
    model = network()
    known = Anatomy.of(model)
    model[1].running_mean.data = torch.full((4,), 1 / 3, dtype=torch.float64)
    kept = Buffers(Anatomy.of(model, known))
    model[1].running_mean.data.zero_()
    kept.restore()
    assert torch.equal(model[1].running_mean, torch.full((4,), 1 / 3, dtype=torch.float64))

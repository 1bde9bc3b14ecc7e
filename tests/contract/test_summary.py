"""One table says which layer gets which treatment, and why where something falls back."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.toys import CLASSES, FEATURES, B, backward, batches, mlp
from torch import Tensor, nn

from ocnopt import OCNOpt


class Scale(nn.Module):
    """A layer that no adapter knows."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def mixed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), Scale(4), nn.Linear(4, CLASSES)
    ).double()  # fmt: skip


def rows(table: str) -> dict[str, list[str]]:
    """``{layer: [adapter, curvature, stage, parameters, note]}``."""
    head, rule, *body, total = table.splitlines()
    assert head.split() == ["layer", "adapter", "curvature", "stage", "parameters", "note"]
    assert set(rule) == {"-"}
    assert "parameters in" in total
    columns = [head.index(word) for word in head.split()]
    cells = [[line[a:b].strip() for a, b in zip(columns, [*columns[1:], None], strict=True)] for line in body]
    return {name: rest for name, *rest in cells}


def test_is_printed_and_returned(capsys: pytest.CaptureFixture[str]) -> None:
    text = OCNOpt(mlp().parameters()).summary()
    assert capsys.readouterr().out == text + "\n"


def test_without_a_model() -> None:
    found = rows(OCNOpt(mlp().parameters()).summary())
    assert list(found) == [f"parameter {i}" for i in range(6)]
    assert found["parameter 0"] == ["–", "adaptive", "–", "20", ""]


def test_named_parameters_keep_their_names() -> None:
    assert "2.weight" in rows(OCNOpt(mlp().named_parameters()).summary())


def test_at_rank_one_nothing_falls_back() -> None:
    model = mixed()
    found = rows(OCNOpt(model.parameters(), model=model).summary())
    assert list(found) == [n for n, _ in model.named_parameters()]
    assert found["1.weight"][0] == "BatchNormAdapter"
    assert all(note == "" for *_, note in found.values())


def test_above_rank_one_it_says_what_groups_mean() -> None:
    model = mixed()
    text = OCNOpt(model.parameters(), model=model, rank=3).summary()
    found = rows(text)
    assert found["0.weight"][0] == "LinearAdapter"
    assert found["0.weight"][-1] == ""
    assert "couple the samples" in found["1.weight"][-1]
    assert found["3.scale"][-1] == "no adapter is registered for Scale: groups share p.grad"
    assert f"{sum(p.numel() for p in model.parameters())} parameters in 7 players" in text
    model.eval()
    assert rows(OCNOpt(model.parameters(), model=model, rank=3).summary())["1.weight"][-1] == ""


def test_kronecker_blocks_and_what_has_none() -> None:
    model = mixed()
    found = rows(OCNOpt(model.parameters(), model=model, curvature="kronecker").summary())
    assert found["0"][:4] == ["LinearAdapter", "kronecker", "–", "24"]
    assert found["1.weight"][1] == "adaptive"
    assert found["1.weight"][-1] == "no Kronecker structure: adaptive curvature"
    assert found["3.scale"][-1] == "no adapter is registered for Scale: adaptive curvature"


def test_a_block_across_groups() -> None:
    """Other weight decay for the bias is common and no reason to part; another learning rate is one."""
    model = mlp()
    weights, biases = [[p for p in model.parameters() if p.dim() == d] for d in (2, 1)]
    for options, joint in (({"weight_decay": 0.1}, True), ({"lr": 1.0}, False)):
        opt = OCNOpt([{"params": weights, **options}, {"params": biases}], model=model, curvature="kronecker")
        found = rows(opt.summary())
        assert ("2" in found) == joint
        assert joint or found["2.weight"][1:] == [
            "adaptive", "–", "12", "bias of the same layer has other hyper-parameters: adaptive curvature"
        ]  # fmt: skip


def test_frozen_layers() -> None:
    model = mixed()
    model[0].requires_grad_(False)
    opt = OCNOpt(model.parameters(), model=model, rank=3)
    assert rows(opt.summary())["0.weight"][-1] == "frozen"
    model[0].requires_grad_(True)
    assert rows(opt.summary())["0.weight"][-1] == ""


def test_stages_after_a_step_are_those_of_the_forward_pass() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(4, CLASSES), nn.Linear(FEATURES, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(x)))

    model = Backwards().double()
    opt = OCNOpt(model.parameters(), model=model, rank=2)
    backward(model, *batches()[0])
    opt.step()
    stages = {name: row[2] for name, row in rows(opt.summary()).items()}
    assert stages == {"first.weight": "0", "first.bias": "0", "last.weight": "1", "last.bias": "1"}


def test_what_a_step_finds_out_is_added() -> None:
    class Folded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fold, self.head = nn.Linear(1, 2), nn.Linear(2 * FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.fold(x.reshape(-1, 1)).reshape(B, -1))  # the samples are not dimension 0

    model = Folded().double()
    opt = OCNOpt(model.parameters(), model=model, curvature="kronecker", rank=2)
    assert rows(opt.summary())["fold"][1] == "kronecker"
    backward(model, *batches()[0])
    with pytest.warns(UserWarning, match="fold.*does not run over the samples.*not split.*curvature is adaptive"):
        opt.step()
    found = rows(opt.summary())
    assert found["fold"][1] == "adaptive"
    assert "does not run over the samples" in found["fold"][-1]
    assert found["head"][1] == "kronecker"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        backward(model, *batches()[0])
        opt.step()

"""Optimizers by name: the options arrive, and the pair of Muon and AdamW is a pair."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tests.lab.small import OPTIMIZERS as TABLES
from torch import nn

from ocnopt import OCNOpt
from ocnopt.baselines import DDP, EKFAC, EMSA
from ocnopt.lab.optimizers import OPTIMIZERS, MuonAdamW, read_optimizer
from ocnopt.lab.trainer import take_step

X, Y = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


@pytest.mark.parametrize("key", TABLES)
def test_every_optimizer_learns_through_the_same_call(key: str) -> None:
    net = network()
    optimizer = read_optimizer(TABLES[key]).build(net)
    losses = [float(take_step(net, optimizer, X, Y)) for _ in range(20)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("table", "kind", "expected"),
    [
        ({"name": "sgdm", "lr": 1}, torch.optim.SGD, {"lr": 1.0, "momentum": 0.9, "nesterov": False}),
        ({"name": "rmsprop", "alpha": 0.5, "momentum": 0.25}, torch.optim.RMSprop, {"alpha": 0.5, "momentum": 0.25}),
        (
            {"name": "adam", "beta1": 0.1, "beta2": 0.2, "eps": 0.3, "weight_decay": 0.4},
            torch.optim.Adam,
            {"betas": (0.1, 0.2), "eps": 0.3, "weight_decay": 0.4},
        ),
        ({"name": "adamw", "beta1": 0.1}, torch.optim.AdamW, {"betas": (0.1, 0.999), "weight_decay": 0.01}),
        ({"name": "ekfac", "damping": 0.5}, EKFAC, {"damping": 0.5}),
        ({"name": "emsa", "rho": 0.5}, EMSA, {"rho": 0.5}),
        ({"name": "ddp", "mu_min": 0.5}, DDP, {"mu_min": 0.5}),
        ({"name": "ocnopt", "rank": 3, "curvature": "kronecker"}, OCNOpt, {"rank": 3, "curvature": "kronecker"}),
    ],
)
def test_options_arrive(table: dict[str, Any], kind: type, expected: dict[str, Any]) -> None:
    optimizer = read_optimizer(table).build(network())
    assert type(optimizer) is kind
    group = optimizer.param_groups[0]
    assert {key: group[key] for key in expected} == expected


def test_ocnopt_can_be_given_everything_it_takes() -> None:
    elsewhere = {"params", "model", "maximize", "accumulate", "process_group", "fused", "graphed"}
    takes = set(inspect.signature(OCNOpt).parameters) - elsewhere
    assert set(OPTIMIZERS["ocnopt"].options) == takes
    assert set(read_optimizer({"name": "ocnopt"}).options) == takes


def test_muon_has_the_matrices_and_adamw_the_rest() -> None:
    ours, theirs = network(), network()
    pair = MuonAdamW(ours.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    muon = torch.optim.Muon(matrices, 0.02, 0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(vectors, 0.02, weight_decay=0.1)
    for _ in range(3):
        take_step(ours, pair, X, Y)
        for optimizer in (muon, adamw):
            optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(X), Y).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_muon_alone_and_adamw_alone() -> None:
    assert list(MuonAdamW([nn.Parameter(torch.ones(2, 2))], 0.1, 0.9, 0.0).parts) == ["muon"]
    assert list(MuonAdamW([nn.Parameter(torch.ones(2))], 0.1, 0.9, 0.0).parts) == ["adamw"]


def test_muon_leaves_embeddings_to_adamw() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3, bias=False))
    parts = read_optimizer({"name": "muon"}).build(model).parts
    assert parts["muon"].param_groups[0]["params"] == [model[1].weight]
    assert parts["adamw"].param_groups[0]["params"] == [model[0].weight]


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"name": "muon"}, None),
        ({"name": "ocnopt"}, None),
        ({"name": "ocnopt", "feedback": "off", "rank": 4}, None),
        ({"name": "ocnopt", "rank": 2, "feedback": "nonlinear", "curvature": "kronecker"}, None),
        (
            {"name": "ocnopt", "feedback": "nonlinear", "alignment": "adaptive"},
            "alignment='adaptive' would get another",
        ),
        ({"name": "ekfac"}, "EKFAC looks at"),
        ({"name": "emsa"}, "E-MSA looks at"),
        ({"name": "ddp"}, "DDP looks at"),
    ],
)
def test_who_can_share_a_batch_with_other_processes(table: dict[str, Any], why: str | None) -> None:
    reason = read_optimizer(table).why_alone()
    assert (reason is None) == (why is None)
    assert why is None or (reason is not None and reason.startswith(why))

"""With the feedback off, OCNOpt takes the steps of torch's own optimizers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.toys import FEATURES, backward, batches, train
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from ocnopt import OCNOpt

STEPS = 100

sgd = {"curvature": "identity", "ema": False}
rmsprop = {"curvature": "adaptive", "momentum": 0.0, "bias_correction": False}
PAIRS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any], dict[str, Any]]] = {
    "sgd": (SGD, {}, {**sgd, "momentum": 0.0}),
    "sgd-momentum": (SGD, {"momentum": 0.9}, {**sgd, "momentum": 0.9}),
    "sgd-nesterov": (
        SGD,
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
        {**sgd, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    ),
    "sgd-maximize": (
        SGD,
        {"momentum": 0.5, "weight_decay": 0.02, "maximize": True},
        {**sgd, "momentum": 0.5, "weight_decay": 0.02, "maximize": True},
    ),
    "rmsprop": (RMSprop, {"alpha": 0.9, "weight_decay": 0.01}, {**rmsprop, "decay": 0.9, "weight_decay": 0.01}),
    "rmsprop-maximize": (
        RMSprop,
        {"alpha": 0.99, "maximize": True, "eps": 1e-4},
        {**rmsprop, "decay": 0.99, "maximize": True, "eps": 1e-4},
    ),
    "adam": (Adam, {"betas": (0.9, 0.999)}, {"momentum": 0.9, "decay": 0.999}),
    "adam-decay": (
        Adam,
        {"betas": (0.7, 0.95), "weight_decay": 0.05, "eps": 1e-5},
        {"momentum": 0.7, "decay": 0.95, "weight_decay": 0.05, "eps": 1e-5},
    ),
    "adam-without-momentum": (Adam, {"betas": (0.0, 0.9)}, {"momentum": 0.0, "decay": 0.9}),
    "adamw": (
        AdamW,
        {"betas": (0.8, 0.99), "weight_decay": 0.1},
        {"momentum": 0.8, "decay": 0.99, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
}


class Uneven(nn.Module):
    """Two of its layers are not always there: one starts late, one comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 4)
        self.late = nn.Linear(FEATURES, 4)
        self.fitful = nn.Linear(FEATURES, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: tuple[Tensor, int]) -> Tensor:
        x, step = x
        h = self.body(x)
        if step >= 10:
            h = h + self.late(x)
        if step % 3 != 1:
            h = h + self.fitful(x)
        return self.head(torch.tanh(h))


def trained(make: Callable[..., Optimizer], options: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    model = Uneven().to(dtype)
    groups = [
        {"params": [*model.head.parameters(), *model.late.parameters()]},
        {"params": [*model.body.parameters(), *model.fitful.parameters()], "lr": 3e-3, "weight_decay": 0.03},
    ]
    opt = make(groups, lr=1e-2, **options)
    schedule = LambdaLR(opt, [lambda t: 1 / (1 + 0.05 * t), lambda t: 0.98**t])
    data = batches(7, dtype=dtype)
    for step in range(STEPS):
        opt.zero_grad()
        x, y = data[step % len(data)]
        backward(model, (x, step), y)
        opt.step()
        schedule.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_takes_the_same_steps(pair: str, dtype: torch.dtype) -> None:
    theirs, options, ours = PAIRS[pair]
    expected = trained(theirs, options, dtype)
    found = trained(OCNOpt, {**ours, "feedback": "off"}, dtype)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("pair", ["sgd-nesterov", "adamw"])
def test_rank_and_model_do_not_matter_without_feedback(pair: str) -> None:
    _, _, ours = PAIRS[pair]
    plain = trained(OCNOpt, {**ours, "feedback": "off"}, torch.float64)
    ranked = trained(OCNOpt, {**ours, "feedback": "off", "rank": 3, "bellman": "paper"}, torch.float64)
    torch.testing.assert_close(ranked, plain, rtol=0, atol=0)


@pytest.mark.parametrize("lr", [torch.tensor(0.02), torch.tensor([0.02])], ids=["0-dim", "1-dim"])
@pytest.mark.parametrize("options", [{"feedback": "off"}, {"bellman": "paper", "weight_decay": 0.1}], ids=str)
def test_a_tensor_as_learning_rate(lr: Tensor, options: dict[str, Any]) -> None:
    found = []
    for rate in (0.02, lr):
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, 3).double()
        opt = OCNOpt(model.parameters(), rate, **options)
        train(model, opt, batches(5))
        found.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)

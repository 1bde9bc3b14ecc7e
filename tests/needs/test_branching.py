"""Residual connections, parallel paths, concatenation, attention: all of it trains, in every game, without a word."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.toys import CLASSES, FEATURES, SOME_GAMES, B, batches, name_of, train, values
from torch import Tensor, nn

from ocnopt import OCNOpt

WORDS, T, WIDTH = 9, 4, 8


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.outer = (
            nn.Linear(FEATURES, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(x + self.outer(torch.tanh(self.inner(x))))


class Parallel(nn.Module):
    """Two paths that never meet before the loss, and one that meets them half-way."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, WIDTH), nn.Linear(FEATURES, WIDTH)
        self.gate, self.a, self.b = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        return self.a(gate * torch.tanh(self.left(x))) + self.b((1 - gate) * torch.tanh(self.right(x)))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(1 + 2 * i, 2, 3, padding=1) for i in range(3)])
        self.norms = nn.ModuleList([nn.GroupNorm(1, 1 + 2 * i) for i in range(3)])
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :4].unsqueeze(-1).expand(-1, -1, -1, 4)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat([x, torch.relu(layer(norm(x)))], 1)
        return self.head(x.mean((2, 3)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(tokens)).mean(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (2, -1)).transpose(1, 2).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    """Two blocks; positions come as rows of their own, one per sample; head and embedding are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(T, WIDTH)
        self.blocks, self.norm = nn.ModuleList([Block(), Block()]), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(T).expand_as(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).mean(1)


def vectors() -> tuple[Tensor, Tensor]:
    return batches()[0]


def words() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    return torch.randint(WORDS, (B, T), generator=g), torch.randint(CLASSES, (B,), generator=g)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "residual": (Residual, vectors),
    "parallel": (Parallel, vectors),
    "dense": (Dense, vectors),
    "encoder": (Encoder, words),
    "gpt": (GPT, words),
}


def build(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    make, data = NETS[name]
    return make().double(), data()


GAMES = [*SOME_GAMES, {"curvature": "identity", "feedback": "nonlinear", "rank": 3}]


@pytest.mark.parametrize("game", GAMES, ids=name_of)
@pytest.mark.parametrize("net", NETS)
def test_trains_with_finite_diagnostics(net: str, game: dict[str, Any]) -> None:
    model, data = build(net)
    lr = 0.3 if game["curvature"] == "identity" else 0.03
    opt = OCNOpt(model.parameters(), lr, model=model, damping=0.1, **game)
    losses = train(model, opt, [data] * 12)
    assert losses[-1] < 0.9 * losses[0]
    found = opt.diagnostics
    for layer in found.layers:
        assert all(map(math.isfinite, (layer.trace, layer.w_min, layer.w_max, layer.s)))
        assert layer.trace > 0
    assert math.isfinite(found.predicted_change)
    assert "p.grad" not in opt.summary()
    assert all(t.isfinite().all() for t in values(model))


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("rank", [2, "full"])
def test_measured_and_predicted_changes_agree_to_first_order(net: str, rank: Any) -> None:
    """The linear rollout predicts what each layer changes, the nonlinear one measures it over all live edges."""
    found = []
    for feedback in ("linear", "nonlinear"):
        model, data = build(net)
        if net == "gpt":  # tied weights act at their first use, before their second one can be measured
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        torch.manual_seed(3)
        opt = OCNOpt(
            model.parameters(), 1e-6, model=model, feedback=feedback, rank=rank, curvature="identity", momentum=0.0
        )
        train(model, opt, [data])
        found.append(opt.diagnostics)
    linear, nonlinear = found
    K, u = linear.kernels.plan
    changes = dict(zip(linear.names, -(torch.einsum("nij,nj->ni", K, linear.w) + u), strict=True))
    assert set(changes) == set(nonlinear.names)
    expected = [
        sum((changes[m] for m, j in zip(nonlinear.names, nonlinear.stage_of, strict=True) if j < k), 0 * u[0])
        for k in nonlinear.stage_of
    ]
    scale = linear.s.abs().max()
    torch.testing.assert_close(nonlinear.s / scale, torch.stack(expected) / scale, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("net", NETS)
def test_every_layer_has_its_stage_in_the_order_of_its_first_call(net: str) -> None:
    model, data = build(net)
    called: list[str] = []
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(lambda m, a, name=name: called.append(name))
    opt = OCNOpt(model.parameters(), 0.01, model=model, rank=2)
    train(model, opt, [data])
    stages = [layer.name for layer in opt.diagnostics.layers]
    first_calls = [n for n in dict.fromkeys(called) if n in stages]
    assert stages == first_calls

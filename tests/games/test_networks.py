"""Whole networks as games: what is found in them, that they step, and how they are drawn."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exact.nets import seeded
from tests.games import markov
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from ocnopt import OCNOpt


class Basic(nn.Module):
    """The block of ResNet18, with its skip connection called last."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, out, 3, out // into, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        project = nn.Sequential(nn.Conv2d(into, out, 1, out // into, bias=False), nn.BatchNorm2d(out))
        self.downsample = None if into == out else project

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def resnet18(width: int = 4) -> nn.Sequential:
    """The graph of ResNet18, with few channels."""
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    widths = [width * 2**i for i in (0, 0, 0, 1, 1, 2, 2, 3, 3)]
    blocks = [Basic(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 5))


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.n1(x)
        heads = (each(y).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.out(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.n2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, width), nn.Parameter(torch.zeros(6, width))
        self.blocks, self.norm = nn.Sequential(*(Block(width) for _ in range(layers))), nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        _, length = tokens.shape
        assert length <= len(self.positions)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions[:length]))).reshape(-1, 11)


def images(batch: int = 4) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(batch, 3, 8, 8, generator=g), torch.randint(5, (batch,), generator=g)


def words(batch: int = 4) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randint(11, (batch, 6), generator=g), torch.randint(11, (batch * 6,), generator=g)


NETS: dict[str, Any] = {"resnet18": (resnet18, images), "transformer": (GPT, words)}


@pytest.mark.parametrize("curvature", ["identity", "adaptive", "kronecker"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NETS)
def test_steps_with_finite_diagnostics(name: str, autocast: bool, curvature: str) -> None:
    build, data = NETS[name]
    with seeded(0):
        model = build()
    opt = OCNOpt(model.parameters(), 0.02, model=model, feedback="nonlinear", curvature=curvature, damping=0.1)
    for batch in (4, 4, 3):  # the last batch of an epoch is smaller
        x, y = data(batch)
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        assert opt.game.why_accumulated is None
        assert all(math.isfinite(v) for layer in opt.diagnostics.layers for v in (layer.trace, layer.w_max, layer.s))
        assert math.isfinite(opt.diagnostics.predicted_change)
        assert opt.diagnostics.skipped_steps == 0
    assert any(layer.s < 0 for layer in opt.diagnostics.layers)


def test_the_game_of_resnet18() -> None:
    with seeded(0):
        model = resnet18()
    game = OCNOpt(model.parameters(), model=model).game.trace(images()[0])
    assert [(b.name.rpartition(".")[2], b.slack) for b in game.branches] == [("downsample", 1)] * 3
    assert len(game.stages) == 1 + 8 * 2 + 1
    expected = [{"0", "1"}]
    for i in range(3, 11):
        skip = {f"{i}.downsample.0", f"{i}.downsample.1"} if i in (5, 7, 9) else set()
        expected += [{f"{i}.conv1", f"{i}.bn1"} | skip, {f"{i}.conv2", f"{i}.bn2"}]
    assert [set(stage.players) for stage in game.stages] == [*expected, {"13"}]


def test_the_game_of_a_transformer() -> None:
    model = GPT(1)
    stages = OCNOpt(model.parameters(), model=model).game.trace(words()[0]).stages
    assert [set(stage.players) for stage in stages] == [
        {"tokens"},
        {"positions", "blocks.0.n1"},
        {"blocks.0.q", "blocks.0.k", "blocks.0.v"},
        {"blocks.0.out", "blocks.0.n2"},
        {"blocks.0.up"},
        {"blocks.0.down", "norm"},
        {"head"},
    ]
    reads = {source for source, _ in stages[3].state}
    assert len(reads) == 2  # what the attention gathered, and the residual stream
    assert [reader for _, reader in stages[4].state].count("blocks.0.up") == 1


def test_a_trace_beside_the_hooks_of_a_game() -> None:
    """Of an optimizer that watches inputs and outputs: the same picture as without one."""
    pictures = []
    for feedback in ("linear", "nonlinear"):
        model = markov.Residual(True)
        opt = OCNOpt(model.parameters(), model=model, feedback=feedback)
        pictures.append(opt.game.trace(torch.randn(2, 5)).draw())
    assert pictures[0] == pictures[1]


def test_tracing_changes_nothing() -> None:
    with seeded(0):
        model = resnet18()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    opt = OCNOpt(model.parameters(), model=model)
    with pytest.raises(RuntimeError, match=r"not known: call game\.trace"):
        opt.game.stages  # noqa: B018
    opt.game.trace(images()[0])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(RuntimeError, match=r"game\.trace needs a network"):
        OCNOpt(model.parameters()).game.trace(images()[0])


def test_a_drawing(tmp_path: Path) -> None:
    model = markov.Residual(True)
    game = OCNOpt(model.parameters(), model=model).game.trace(torch.randn(2, 5))
    text = game.draw(tmp_path / "game.svg")
    assert "stage   1  a, skip" in text
    assert "on tanh_1 → b, skip → add_" in text
    assert "skip may be late by up to 1 and is late by 0" in text
    drawn = ET.parse(tmp_path / "game.svg").getroot()
    labels = [t.text for t in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert labels[:7] == ["into", "a", "b", "skip", "add", "head", "output"]
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}path"))) == 1 + 7  # the arrow's tip, and seven arrows
    game.draw(tmp_path / "game.png")
    assert (tmp_path / "game.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match=r"^path must end in \.svg or \.png"):
        game.draw(tmp_path / "game.pdf")

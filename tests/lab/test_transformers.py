"""The transformers: what they compute, and that they train like every other network of the lab."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.small import create
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt
from ocnopt.lab import data
from ocnopt.lab.config import parse_run
from ocnopt.lab.models import Attention, TransformerBlock, build
from ocnopt.lab.recipes import read_recipe
from ocnopt.lab.trainer import evaluate, loss_of
from ocnopt.lab.training import train

T, V = 12, 7


def characters(count: int = 3, length: int = T) -> Tensor:
    return torch.randint(V, (count, length), generator=torch.Generator().manual_seed(0))


def test_a_language_model_says_something_at_every_place() -> None:
    model = build("gpt", (T,), V, layers=3, width=8, heads=2)
    assert model(characters()).shape == (3, T, V)
    assert model(characters(length=5)).shape == (3, 5, V)  # a beginning will do
    assert len([m for m in model if isinstance(m, TransformerBlock)]) == 3


def test_a_language_model_does_not_look_ahead() -> None:
    model = build("gpt", (T,), V, width=8, heads=2)
    x = characters()
    changed = x.clone()
    changed[:, 6] = (changed[:, 6] + 1) % V
    with torch.no_grad():
        before, after = model(x), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.isclose(before[:, 6:], after[:, 6:]).all(dim=-1).any()


def test_a_language_model_knows_places() -> None:
    model = build("gpt", (T,), V, width=8, heads=2)
    with torch.no_grad():
        same = model(torch.zeros(1, T, dtype=torch.long))[0]
    assert not torch.isclose(same[0], same[1]).all()


def test_a_vision_transformer_sees_every_pixel_at_once() -> None:
    model = build("vit", (3, 8, 8), 5, patch=4, layers=1, width=8, heads=2)
    images = torch.randn(2, 3, 8, 8, requires_grad=True)
    logits = model(images)
    assert logits.shape == (2, 5)
    (pixels,) = torch.autograd.grad(logits[0, 0], images)
    assert (pixels[0] != 0).all()
    assert (pixels[1] == 0).all()
    torch.testing.assert_close(logits, model[-1](model[:-2](images).mean(dim=1)))


def test_patches_are_pixels_in_their_order() -> None:
    embedding = build("vit", (1, 4, 6), 5, patch=2, layers=1, width=4, heads=1)[0]
    images = torch.randn(2, 1, 4, 6)
    weight, bias = embedding.project.weight, embedding.project.bias
    corner = torch.tensordot(images[:, :, 2:4, 4:6], weight, dims=([1, 2, 3], [1, 2, 3])) + bias
    torch.testing.assert_close(embedding(images)[:, 5], corner)  # second row, third column
    assert embedding(images).shape == (2, 6, 4)


def test_digits_have_sixteen_patches() -> None:
    assert build("vit", (1, 8, 8), 10, dataset="DIGITS")[1].places.num_embeddings == 16
    assert build("vit", (3, 32, 32), 10, dataset="CIFAR10")[1].places.num_embeddings == 64


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_three_linear_layers_and_the_softmax_between_them(causal: bool) -> None:
    torch.manual_seed(0)
    attention = Attention(6, 2, causal=causal).double()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    heads = []
    for part in (slice(0, 3), slice(3, 6)):
        q, k, v = (layer(x)[..., part] for layer in (attention.query, attention.key, attention.value))
        scores = q @ k.mT / math.sqrt(3)
        if causal:
            scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(attention(x), attention.out(torch.cat(heads, dim=-1)))


def test_a_block_adds_two_branches_behind_normalisations() -> None:
    torch.manual_seed(0)
    block = TransformerBlock(8, 2, causal=False)
    x = torch.randn(2, 5, 8)
    middle = x + block.attention(block.attention_norm(x))
    expected = middle + block.mlp_out(nn.functional.gelu(block.mlp_in(block.mlp_norm(middle))))
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("gpt", (3, 8, 8), 5), {}, r"input_shape must be \(length,\) of a text"),
        (("gpt", (8,), 5), {"width": 10, "heads": 4}, "heads must divide width; got 4 heads and width 10"),
        (("gpt", (8,), 5), {"heads": 0}, "heads must divide width; got 0 heads"),
        (("gpt", (8,), 5), {"layers": 0}, "layers must be at least 1; got 0"),
        (("vit", (8,), 5), {}, r"input_shape must be \(channels, height, width\)"),
        (("vit", (1, 8, 6), 5), {"patch": 4}, "patch must divide height and width; got 4 for 8×6 pixels"),
        (("vit", (1, 6, 8), 5), {"patch": 4}, "patch must divide height and width; got 4 for 6×8 pixels"),
        (("vit", (1, 8, 8), 5), {"patch": 0}, "patch must divide height and width; got 0"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(*arguments, **options)


# --- training ---


def test_the_loss_is_the_mean_over_places() -> None:
    output, y = torch.randn(3, T, V), characters()
    by_place = torch.stack([cross_entropy(output[:, t], y[:, t]) for t in range(T)])
    torch.testing.assert_close(loss_of(output, y), by_place.mean())
    assert torch.equal(loss_of(output[:, 0], y[:, 0]), cross_entropy(output[:, 0], y[:, 0]))


def test_accuracy_is_that_of_single_characters() -> None:
    model = build("gpt", (T,), V, width=8, heads=2)
    x, y = characters(5), (characters(5) + 1) % V
    loss, accuracy = evaluate(model, data.Split(x, y))
    with torch.no_grad():
        output = model(x)
    right = sum(int(output[n, t].argmax()) == int(y[n, t]) for n in range(5) for t in range(T))
    assert accuracy == pytest.approx(right / (5 * T))
    assert loss == pytest.approx(cross_entropy(output.transpose(1, 2), y).item())


def small_text(**optimizer: Any) -> dict[str, Any]:
    return {
        "data": {"name": "Genesis", "batch_size": 16, "train_limit": 800, "test_limit": 100, "block_length": 16},
        "network": {"name": "gpt", "layers": 1, "width": 16, "heads": 2},
        "optimizer": optimizer,
        "training": {"epochs": 2, "schedule": "cosine"},
    }


@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "ocnopt", "lr": 0.03},
        {"name": "ocnopt", "lr": 0.01, "curvature": "kronecker", "feedback": "nonlinear", "rank": 4},
        {"name": "adamw", "lr": 0.01},
        {"name": "muon", "lr": 0.03},
    ],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_a_language_model_learns(optimizer: dict[str, Any], tmp_path: Path) -> None:
    folder = create(tmp_path / "run", parse_run(small_text(**optimizer)))
    final = train(folder)
    assert not final["diverged"]
    assert final["train_loss"] < 2.9  # a character by its frequency alone: 2.95 nats
    last = folder.metrics("epoch")[-1]
    assert last["validation_loss"] < 2.8
    assert last["test_accuracy"] > 0.22  # always a space: 0.19


def test_a_vision_transformer_learns(tmp_path: Path) -> None:
    table = {
        "data": {"name": "DIGITS", "batch_size": 32, "train_limit": 800},
        "network": {"name": "vit", "layers": 1, "width": 16, "heads": 2},
        "optimizer": {"name": "ocnopt", "lr": 0.03},
        "training": {"epochs": 4},
    }
    assert train(create(tmp_path / "run", parse_run(table)))["test_accuracy"] > 0.5


@pytest.mark.parametrize("feedback", ["linear", "nonlinear"])
@pytest.mark.parametrize(("name", "shape"), [("gpt", (T,)), ("vit", (1, 8, 8))])
def test_queries_keys_and_values_are_layers_of_their_own(name: str, shape: tuple[int, ...], feedback: str) -> None:
    model = build(name, shape, V, layers=2, width=8, heads=2)
    opt = OCNOpt(model.parameters(), 0.01, model=model, feedback=feedback)
    x = characters() if name == "gpt" else torch.randn(3, *shape)
    y = characters() if name == "gpt" else torch.tensor([0, 1, 2])
    for _ in range(2):
        opt.zero_grad()
        loss_of(model(x), y).backward()
        opt.step()
    names = {layer.name for layer in opt.diagnostics.layers}
    assert {f"{block}.attention.{part}" for block in (2, 3) for part in ("query", "key", "value")} <= names
    assert "1.places" in names  # with samples of its own, like everything else


@pytest.mark.parametrize("name", ["transformer-text", "vit-digits", "vit-cifar10"])
def test_recipes_have_what_one_would_compare_with(name: str) -> None:
    recipe = read_recipe(name)
    assert list(recipe.grids) == ["ocnopt", "adamw", "muon"]
    assert recipe.run.network.name == ("gpt" if name == "transformer-text" else "vit")
    rates = {grid.choices["lr"] for grid in recipe.grids.values()}
    assert len(rates) == 1  # the same for all
    assert recipe.run.optimizer.lr in rates.pop()

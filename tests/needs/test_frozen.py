"""Layers that are not trained, not yet, or only in part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import (
    FEATURES,
    GAMES,
    SOME_GAMES,
    assert_identical,
    backward,
    batches,
    differ,
    mlp,
    name_of,
    train,
    values,
)
from torch import Tensor, nn

from ocnopt import OCNOpt

games = pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)


@pytest.mark.parametrize("game", GAMES, ids=name_of)
def test_a_frozen_beginning_is_a_fixed_feature_map(game: dict[str, Any]) -> None:
    """The rest trains as a network of its own on the features, step for step."""
    whole, parts = mlp(depth=4), mlp(depth=4)
    whole[0].requires_grad_(False)
    before = values(whole[0])
    opt = OCNOpt(whole.parameters(), 0.1, model=whole, **game)
    train(whole, opt, batches(3))
    assert_identical(values(whole[0]), before)
    tail = parts[1:]
    opt2 = OCNOpt(tail.parameters(), 0.1, model=tail, **game)
    with torch.no_grad():
        features = [(parts[0](x), y) for x, y in batches(3)]
    train(tail, opt2, features)
    torch.testing.assert_close(values(whole[1:]), values(tail), rtol=1e-9, atol=1e-12)


@games
def test_thawed_layers_join_the_game(game: dict[str, Any]) -> None:
    """After the thaw the step is that of an optimizer that never knew of the frost."""
    model, twin = mlp(), mlp()
    model[0].requires_grad_(False)
    opt = OCNOpt(model.parameters(), 0.0, model=model, momentum=0.0, weight_decay=0.0, **game)
    train(model, opt, batches(1))
    model[0].requires_grad_(True)
    fresh = OCNOpt(twin.parameters(), 0.1, model=twin, momentum=0.0, **game)
    opt.param_groups[0]["lr"] = 0.1
    opt.state.clear()
    for net, optimizer in ((model, opt), (twin, fresh)):
        train(net, optimizer, batches(1, seed=9))
    torch.testing.assert_close(values(model), values(twin), rtol=1e-10, atol=1e-12)
    assert differ(values(model), values(mlp()))


@pytest.mark.parametrize("thaws", [True, False])
@pytest.mark.parametrize("game", [g for g in SOME_GAMES if g["feedback"] == "nonlinear"], ids=name_of)
def test_a_fork_with_one_path_frozen_is_a_chain(game: dict[str, Any], thaws: bool) -> None:
    """The same calls in the same order are a chain before the thaw and none after it, or the other way round."""

    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.head = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.left(x)) * torch.tanh(self.right(x)))

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Fork().double())
    model, twin = models
    model.right.requires_grad_(not thaws)
    opt = OCNOpt(model.parameters(), 0.0, model=model, momentum=0.0, **game)
    train(model, opt, batches(1))
    opt.zero_grad()
    for net in models:
        net.right.requires_grad_(thaws)
    opt.param_groups[0]["lr"] = 1.0
    opt.state.clear()
    fresh = OCNOpt(twin.parameters(), 1.0, model=twin, momentum=0.0, **game)
    for net, optimizer in ((model, opt), (twin, fresh)):
        train(net, optimizer, batches(1, seed=9))
    torch.testing.assert_close(values(model), values(twin), rtol=1e-10, atol=1e-12)


@games
def test_frozen_on_the_way(game: dict[str, Any]) -> None:
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.1, model=model, weight_decay=0.1, **game)
    train(model, opt, batches(2))
    model[1].requires_grad_(False)
    opt.zero_grad()
    before = values(model[1])
    train(model, opt, batches(2))
    assert_identical(values(model[1]), before)
    assert "frozen" in opt.summary()


@games
@pytest.mark.parametrize("which", ["weight", "bias"])
def test_half_a_layer(game: dict[str, Any], which: str) -> None:
    model = mlp()
    frozen = getattr(model[1][0], which)
    frozen.requires_grad_(False)
    before, others = frozen.clone(), values(model[2])
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    losses = train(model, opt, batches(1) * 10)
    assert_identical(frozen, before)
    assert differ(values(model[2]), others)
    assert losses[-1] < losses[0]


@games
def test_only_some_layers_belong_to_the_optimizer(game: dict[str, Any]) -> None:
    """The others have gradients, but are not its business: their values, and the step, do not depend on them."""
    model = mlp()
    before = values(model[1])
    opt = OCNOpt([*model[0].parameters(), *model[2].parameters()], 0.05, model=model, **game)
    losses = [train(model, opt, batches(1))[0] for _ in range(10)]
    model.zero_grad()
    assert_identical(values(model[1]), before)
    assert losses[-1] < losses[0]
    assert [layer.name for layer in opt.diagnostics.layers] == ["0.0", "2"]


class LoRA(nn.Module):
    """A frozen layer with a trained low-rank change, of which one half starts at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@games
def test_low_rank_changes_of_a_frozen_network(game: dict[str, Any]) -> None:
    base = mlp()
    model = nn.Sequential(LoRA(base[0][0]), nn.Tanh(), LoRA(base[1][0]), nn.Tanh(), LoRA(base[2])).double()
    frozen = [p.clone() for p in model.parameters() if not p.requires_grad]
    trained = [p for p in model.parameters() if p.requires_grad]
    lr = 1.0 if game["curvature"] == "identity" else 0.1
    opt = OCNOpt(trained, lr, model=model, damping=0.1, **game)
    losses = train(model, opt, batches(1) * 15)
    assert losses[-1] < 0.9 * losses[0]
    assert_identical([p for p in model.parameters() if not p.requires_grad], frozen)
    assert len(opt.diagnostics.layers) == 6


@pytest.mark.parametrize("game", [g for g in SOME_GAMES if g["feedback"] == "nonlinear"], ids=name_of)
def test_an_input_that_wants_gradients_itself(game: dict[str, Any]) -> None:
    """Adversarial training, saliency: the first layer's input may need a gradient, and keeps it."""
    runs = []
    for wanted in (False, True):
        model, (x, y) = mlp(), batches()[0]
        opt = OCNOpt(model.parameters(), 0.1, model=model, **game)
        x = x.clone().requires_grad_(wanted)
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        assert (x.grad is not None) == wanted
        runs.append(values(model))
    torch.testing.assert_close(*runs, rtol=1e-12, atol=1e-14)
    assert x.shape[1] == FEATURES


@pytest.mark.parametrize("thaws", [True, False])
@pytest.mark.parametrize("steps", [10, 13])  # with an old basis, and in the middle
def test_a_layer_that_loses_or_gains_its_bias_is_looked_at_at_once(thaws: bool, steps: int) -> None:
    """Between two looks, too: the first step after the change is that of a layer which was never seen before."""
    model = mlp()
    layer = model[0][0]
    layer.bias.requires_grad_(not thaws)
    opt = OCNOpt(model.parameters(), 0.05, model=model, curvature="kronecker", refresh_every=10, factor_every=5)
    data = batches(steps + 4)
    train(model, opt, data[:steps])
    layer.bias.requires_grad_(thaws)
    for seen, batch in enumerate(data[steps:], start=1):
        train(model, opt, [batch])
        kept = opt.state[layer.weight]
        assert kept["eigenvalues"].shape[-1] == layer.in_features + thaws
        assert (int(kept["statistics"]), kept["refreshed_at"]) == (seen, max(1, seen - 1))


def test_a_bias_that_is_frozen_after_the_forward_pass() -> None:
    """Nobody has seen the layer as it is now: it acts with adaptive curvature, and says so."""
    model = mlp()
    opt = OCNOpt(model.parameters(), 0.05, model=model, curvature="kronecker", refresh_every=10, factor_every=5)
    data = batches(12)
    train(model, opt, data[:10])
    opt.zero_grad()
    backward(model, *data[10])
    model[0][0].bias.requires_grad_(False)
    before = values(model)
    with pytest.warns(UserWarning, match="adaptive"):
        opt.step()
    assert differ(values(model), before)
    train(model, opt, data[11:])
    assert opt.state[model[0][0].weight]["statistics"] == 1

"""Layers whose dimension 0 is not that of the samples fall back loudly, also where the two have the same size."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.toys import CLASSES, SOME_GAMES, assert_identical, name_of, on_every_call, state_of, values
from torch import Tensor, nn

from ocnopt import OCNOpt

WORDS, WIDTH = 11, 4
SPLIT = [g for g in SOME_GAMES if g["rank"] != 1]
RANK_ONE = {"curvature": "kronecker", "feedback": "linear", "rank": 1}


class Encoder(nn.Module):
    """A transformer layer on tokens [B, T], in the order that the layer wants."""

    def __init__(self, sequence_first: bool) -> None:
        super().__init__()
        self.sequence_first = sequence_first
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 6, 0.0, batch_first=not sequence_first)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = self.inner(x.transpose(0, 1)).transpose(0, 1) if self.sequence_first else self.inner(x)
        return self.head(x.mean(1))


class Positional(nn.Module):
    """Positions are embedded once for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(torch.tanh(x).mean(1))


class Turned(nn.Module):
    """[B, F] and [F, B] have one shape when F = B."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.straight, self.turned, self.head = (nn.Linear(size, n) for n in (size, size, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.straight(x))
        return self.head(torch.tanh(self.turned(x.T)).T)


class Folded(nn.Module):
    """The sequence is folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.folded, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        return self.head(torch.tanh(self.folded(x.reshape(-1, WIDTH))).reshape(x.shape).mean(1))


def tokens(batch: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (batch, length), generator=g), torch.randint(CLASSES, (batch,), generator=g)


def floats(batch: int, features: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, features, generator=g, dtype=torch.float64)
    return x, torch.randint(CLASSES, (batch,), generator=g)


def step(model: nn.Module, opt: OCNOpt, x: Tensor, y: Tensor) -> list[str]:
    """One step; returns what it warned of."""
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    return [str(w.message) for w in caught]


def layers_named(messages: list[str]) -> set[str]:
    return {re.sub(r"\.(weight|bias|in_proj_\w+|out_proj|out_proj\.\w+)$", "", m.split(":")[0]) for m in messages}


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, Tensor], set[str]]] = {
    "sequence first, T = B": (
        lambda: Encoder(True),
        tokens(6, 6),
        {"inner.self_attn", "inner.linear1", "inner.linear2", "inner.norm1", "inner.norm2"},
    ),
    "sequence first, T ≠ B": (
        lambda: Encoder(True),
        tokens(6, 5),
        {"inner.self_attn", "inner.linear1", "inner.linear2", "inner.norm1", "inner.norm2"},
    ),
    "batch first, T = B": (lambda: Encoder(False), tokens(6, 6), set()),
    "positions, T = B": (Positional, tokens(6, 6), {"positions"}),
    "positions, T ≠ B": (Positional, tokens(6, 4), {"positions"}),
    "turned, F = B": (lambda: Turned(6), floats(6, 6), {"turned", "head"}),  # and what comes back is mixed
    "folded": (Folded, tokens(6, 4), {"folded"}),
}


def make(case: str) -> tuple[nn.Module, tuple[Tensor, Tensor], set[str]]:
    build, data, expected = CASES[case]
    torch.manual_seed(0)
    return build().double(), data, expected


@pytest.mark.parametrize("game", [*SPLIT, RANK_ONE], ids=name_of)
@pytest.mark.parametrize("case", CASES)
def test_says_which_layers_fall_back_and_only_those(case: str, game: dict[str, Any]) -> None:
    model, data, expected = make(case)
    opt = OCNOpt(model.parameters(), 0.01, model=model, **game)
    said = step(model, opt, *data)
    unstructured = {n for n in expected if n == "positions" or "norm" in n}
    # at rank 1 only Kronecker statistics read single samples; these layers have none
    assert layers_named(said) == (expected - unstructured if game is RANK_ONE else expected)
    assert step(model, opt, *data) == [], "once"
    assert all(t.isfinite().all() for t in values(model))
    table = opt.summary()
    for layer in layers_named(said):
        assert re.search(rf"^{re.escape(layer)}\b.*(samples|sequence|not seen)", table, re.MULTILINE), layer


@pytest.mark.parametrize("game", SPLIT, ids=name_of)
@pytest.mark.parametrize("case", ["sequence first, T = B", "positions, T = B", "turned, F = B"])
def test_the_groups_are_those_of_a_size_that_cannot_be_mistaken(case: str, game: dict[str, Any]) -> None:
    """Samples in twos: with T = B as with T ≠ B the fallback gives the group weights of sample gradients alone."""
    model, (x, y), expected = make(case)
    opt = OCNOpt(model.parameters(), 0.01, model=model, clamp=False, **{**game, "curvature": "identity"})
    step(model, opt, x, y)
    kernels = opt.diagnostics.kernels
    assert kernels is not None
    names = [layer.name for layer in opt.diagnostics.layers]
    fractions = torch.full((opt.diagnostics.w.shape[1],), 1 / opt.diagnostics.w.shape[1], dtype=torch.float64)
    for name, K in zip(names, kernels.K, strict=True):
        if name in expected:  # K = κ n nᵀ / B²
            torch.testing.assert_close(K, K.sum() * torch.outer(fractions, fractions))


def test_a_length_that_happens_to_be_the_batch_is_not_taken_for_it_later() -> None:
    model, _, _ = make("positions, T ≠ B")
    opt = OCNOpt(model.parameters(), 0.01, model=model, rank=3, curvature="identity")
    assert layers_named(step(model, opt, *tokens(6, 4))) == {"positions"}
    for length in (6, 5, 6):
        step(model, opt, *tokens(6, length))
        kernels, w = opt.diagnostics.kernels, opt.diagnostics.w
        K = kernels.K[1]
        torch.testing.assert_close(K, K.sum() * torch.full((3, 3), 1 / 9, dtype=torch.float64))
        assert w is not None


@pytest.mark.parametrize("game", SPLIT, ids=name_of)
def test_probing_leaves_no_trace(game: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, CLASSES)).double()
    model[2].eval()  # a mode of its own
    opt = OCNOpt(model.parameters(), 0.0, model=model, **game)
    x, y = floats(6, 6)
    kept = x.clone()
    nn.functional.cross_entropy(model(x), y).backward()
    before, rng, modes = values(model), torch.get_rng_state(), [m.training for m in model.modules()]
    opt.step()
    assert_identical(values(model), before)
    assert_identical(torch.get_rng_state(), rng)
    assert [m.training for m in model.modules()] == modes
    assert_identical(x, kept)


def test_probing_happens_once_for_each_shape() -> None:
    model, data, _ = make("batch first, T = B")
    calls = []
    on_every_call(model, lambda _: calls.append(1))
    opt = OCNOpt(model.parameters(), 0.01, model=model, rank=3)
    for _ in range(3):
        step(model, opt, *data)
    assert len(calls) == 3 + 3
    step(model, opt, *tokens(4, 6))
    assert len(calls) == 3 + 3 + 1 + 3


class Sampling(nn.Module):
    """Random numbers in evaluation mode too, as in a variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        return self.decode(h + torch.randn_like(h))


class Centred(nn.Module):
    """Samples see each other in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.norm = nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x)))


@pytest.mark.parametrize("kind", [Sampling, Centred])
def test_random_or_coupled_samples_are_still_samples(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    opt = OCNOpt(model.parameters(), 0.01, model=model, rank=3)
    assert step(model, opt, *floats(6, 6)) == []


def test_one_sample_without_its_dimension() -> None:
    """A single vector for a layer that wants rows: nothing to split, and no crash where the sizes agree."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    opt = OCNOpt(model.parameters(), 0.01, model=model, rank=2)
    model(torch.randn(4, dtype=torch.float64)).square().sum().backward()
    before = values(model)
    with pytest.warns(UserWarning, match="0.weight: .*single vector|does not run over the samples"):
        opt.step()
    assert all(not torch.equal(a, b) for a, b in zip(values(model), before, strict=True))


def test_samples_are_those_of_the_first_tensor() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(6, CLASSES)

        def forward(self, *, scale: float, x: Tensor, mask: Tensor) -> Tensor:
            return scale * self.body(x) * mask

    torch.manual_seed(0)
    model = Keyword().double()
    x, y = floats(6, 6)
    for game in SPLIT:
        opt = OCNOpt(model.parameters(), 0.01, model=model, **game)
        nn.functional.cross_entropy(model(scale=2.0, x=x, mask=torch.ones(1, CLASSES)), y).backward()
        opt.step()
        assert state_of(opt)[0]["step"] == 1
        opt.detach()

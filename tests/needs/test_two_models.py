"""Two models with an optimizer each, one trained through the other; and layers that two models share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.toys import CLASSES, FEATURES, SOME_GAMES, assert_identical, batches, differ, mlp, name_of, state_of, values
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import cross_entropy, mse_loss

from ocnopt import OCNOpt

games = pytest.mark.parametrize("game", SOME_GAMES, ids=name_of)


def net(inputs: int, outputs: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


class GAN:
    def __init__(self, game: dict[str, Any]) -> None:
        self.G, self.D = net(3, FEATURES, 0), net(FEATURES, 1, 1)
        self.opt_G = OCNOpt(self.G.parameters(), 0.02, model=self.G, **game)
        self.opt_D = OCNOpt(self.D.parameters(), 0.02, model=self.D, **game)
        self.noise = torch.Generator().manual_seed(4)

    def fake(self) -> Tensor:
        return self.G(torch.randn(6, 3, generator=self.noise, dtype=torch.float64))

    def train_D(self, real: Tensor, together: bool) -> None:
        self.opt_D.zero_grad()
        fake, one = self.fake().detach(), torch.ones(6, 1, dtype=torch.float64)
        if together:
            bce(self.D(torch.cat([real, fake])), torch.cat([one, 0 * one])).mul(2).backward()
        else:
            bce(self.D(real), one).backward()
            bce(self.D(fake), 0 * one).backward()
        self.opt_D.step()

    def train_G(self, how: str) -> None:
        """The loss of the generator goes through the discriminator, and leaves gradients there that nobody wants."""
        self.opt_G.zero_grad()
        self.D.requires_grad_(how != "frozen")
        bce(self.D(self.fake()), torch.ones(6, 1, dtype=torch.float64)).backward()
        self.D.requires_grad_(True)
        self.opt_G.step()
        if how == "module":
            self.D.zero_grad()

    def run(self, how: str, together: bool = False) -> tuple[Any, ...]:
        for real, _ in batches(3):
            self.train_D(real, together)
            self.train_G(how)
        return values(self.G), values(self.D), state_of(self.opt_G), state_of(self.opt_D)


@pytest.mark.parametrize("how", ["frozen", "module"])
@games
def test_the_generator_leaves_no_trace_in_the_discriminator(game: dict[str, Any], how: str) -> None:
    """However its unwanted gradients are avoided or thrown away."""
    assert_identical(GAN(game).run(how), GAN(game).run("next zero_grad"))


@games
def test_real_and_fake_in_two_calls(game: dict[str, Any]) -> None:
    if game["curvature"] == "kronecker":
        game = {**game, "ekfac": False}
    apart, together = (_without_signs(GAN(game).run("frozen", together)) for together in (False, True))
    torch.testing.assert_close(apart, together, rtol=1e-6, atol=1e-9)


def _without_signs(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Eigenvectors have none: a last digit may turn them round."""
    models, states = found[:2], found[2:]
    plain = [[{k: v.abs() if k.endswith("basis") else v for k, v in own.items()} for own in state] for state in states]
    return *models, *plain


@games
def test_both_train(game: dict[str, Any]) -> None:
    gan, start = GAN(game), GAN(game)
    gan.run("frozen")
    for ours, theirs in ((gan.G, start.G), (gan.D, start.D)):
        assert all(not torch.equal(a, b) for a, b in zip(values(ours), values(theirs), strict=True))


class Pupil(nn.Module):
    """Two heads on one body."""

    def __init__(self, body: nn.Module, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body, self.head = body, nn.Linear(4, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


@pytest.mark.parametrize("when", ["before", "between", "after"])
@games
def test_a_teacher_that_shares_layers(game: dict[str, Any], when: str) -> None:
    """It runs without gradients, through the very modules that the pupil is watched in."""
    runs = []
    for asked in (True, False):
        torch.manual_seed(0)
        body = nn.Linear(FEATURES, 4).double()
        pupil, teacher = Pupil(body, 1), Pupil(body, 2)
        opt = OCNOpt(pupil.parameters(), 0.05, model=pupil, **game)
        for x, y in batches(3):
            targets = torch.zeros(6, CLASSES, dtype=torch.float64)
            opt.zero_grad()
            if asked and when == "before":
                ask(teacher, x)
            output = pupil(x)
            if asked and when == "between":
                ask(teacher, x)
            (cross_entropy(output, y) + mse_loss(output, targets)).backward()
            if asked and when == "after":
                ask(teacher, x)
            opt.step()
        runs.append((values(pupil), state_of(opt)))
    assert_identical(*runs)


def ask(teacher: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return teacher(x[:4])


@games
def test_a_teacher_inside_the_forward_pass(game: dict[str, Any]) -> None:
    """Consistency training: the model compares itself with what it says without gradients."""

    class Consistent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                target = self.net(x + 0.1)
            return self.net(x), target

    model = Consistent()
    opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
    start, first, (x, y) = values(model), None, batches()[0]
    for _ in range(10):
        opt.zero_grad()
        output, target = model(x)
        loss = cross_entropy(output, y) + mse_loss(output, target)
        loss.backward()
        opt.step()
        first = loss.item() if first is None else first
    assert differ(values(model), start)
    assert loss.item() < first


@games
def test_an_average_of_the_weights_is_none_of_its_business(game: dict[str, Any]) -> None:
    """``AveragedModel`` copies the network, hooks and all, and is updated after every step."""
    runs = []
    for averaged in (True, False):
        model = mlp()
        opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
        mean = torch.optim.swa_utils.AveragedModel(model) if averaged else None
        for x, y in batches(3):
            opt.zero_grad()
            cross_entropy(model(x), y).backward()
            opt.step()
            if mean is not None:
                mean.update_parameters(model)
                mean(x).sum().backward()
        runs.append((values(model), state_of(opt)))
    assert_identical(*runs)

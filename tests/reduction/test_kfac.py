"""With the feedback off, the Kronecker curvature is empirical K-FAC, written here a second time with dense matrices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ocnopt import OCNOpt

B = 12  # more than any layer has inputs: an eigenbasis of fewer samples is not unique, nor are steps in it
OPTIONS = {"lr": 0.05, "damping": 0.1, "factor_decay": 0.8}


@dataclass
class Block:
    """One layer: what it sees, [B, T, a] with a 1 for the bias, and the adjoint it gets per sample, [B, T, c]."""

    layer: nn.Linear | nn.Conv2d
    turn: int  # steps from the first basis to the second
    every: int  # steps from then on
    A: Tensor | None = None
    C: Tensor | None = None
    squares: Tensor | None = None  # [c, a], in the eigenbasis
    basis: tuple[Tensor, Tensor] | None = None
    made: tuple[Tensor, Tensor] | None = None  # the factors that the next one is of
    dense: Tensor = field(default_factory=lambda: torch.empty(0))

    def see(self, x: Tensor, h: Tensor) -> None:
        if isinstance(self.layer, nn.Conv2d):
            conv = self.layer
            x = F.unfold(x, conv.kernel_size, conv.dilation, conv.padding, conv.stride).mT
            h = h.flatten(2).mT
        else:
            x, h = x.reshape(B, -1, x.shape[-1]), h.reshape(B, -1, h.shape[-1])
        if self.layer.bias is not None:
            x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
        self.x, self.h = x, B * h

    def update(self, step: int, ekfac: bool) -> None:
        T = self.x.shape[1]
        A = sum(torch.outer(v, v) for v in self.x.flatten(0, 1)) / B
        C = sum(torch.outer(v, v) for v in self.h.flatten(0, 1)) / (B * T)
        rho, age = OPTIONS["factor_decay"], step - 1 - self.turn
        if age >= 0 and age % self.every == 0:  # of what the steps before have left
            self.made = self.A, self.C
        if self.made is not None and age % self.every == self.every // 10:  # and a tenth of the time later it serves
            self.decompose(ekfac, *self.made)
        self.A = A if self.A is None else rho * self.A + (1 - rho) * A
        self.C = C if self.C is None else rho * self.C + (1 - rho) * C
        if step == 0:
            self.decompose(ekfac, self.A, self.C)
        if ekfac:
            U_A, U_C = self.basis
            gradients = [h.T @ x for x, h in zip(self.x, self.h, strict=True)]
            squares = torch.stack([(U_C.T @ g @ U_A).square() for g in gradients]).mean(0)
            self.squares = squares if self.squares is None else rho * self.squares + (1 - rho) * squares
            U = torch.kron(U_C, U_A)
            self.dense = U @ torch.diag(self.squares.flatten()) @ U.T

    def decompose(self, ekfac: bool, A: Tensor, C: Tensor) -> None:
        self.basis = torch.linalg.eigh(A)[1], torch.linalg.eigh(C)[1]
        before, self.dense = self.dense, torch.kron(C, A)
        if ekfac and self.squares is not None:  # the averages go on, as the new basis sees them
            U = torch.kron(*reversed(self.basis))
            self.squares = (U.T @ before @ U).diagonal().reshape(self.squares.shape)

    def precondition(self, direction: list[Tensor]) -> list[Tensor]:
        weight, *bias = direction
        matrix = torch.cat([weight.flatten(1), *[b[:, None] for b in bias]], 1)
        dense = self.dense + OPTIONS["damping"] * torch.eye(len(self.dense), dtype=torch.float64)
        solved = torch.linalg.solve(dense, matrix.flatten()).reshape(matrix.shape)
        parts = [solved[:, : weight[0].numel()].reshape(weight.shape), solved[:, -1]]
        return parts[: len(direction)]


class Net(nn.Module):
    """Keeps what each layer sees and says, for the K-FAC above."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.tokens = nn.Linear(4, 3, bias=False)  # three positions share its weight
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = []
        for layer in (self.conv, self.tokens, self.head):
            out = layer(x)
            self.seen.append((layer, x.detach(), out))
            x = torch.tanh(out)
            x = x.flatten(1) if layer is self.tokens else x.flatten(2) if layer is self.conv else x
        return out


def start() -> tuple[Net, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(3)
    model = Net().double()
    return model, [(torch.randn(B, 2, 4, 4, dtype=torch.float64), torch.randint(3, (B,))) for _ in range(16)]


def by_hand(ekfac: bool, momentum: float, decay: float, every: int = 3) -> list[Tensor]:
    model, data = start()
    # each layer in one third of the time, the largest, 18, 9 and 4 inputs, apart from each other
    thirds = ((model.conv, 1), (model.head, 3), (model.tokens, 2))
    blocks = {layer: Block(layer, third * every // 3, every) for layer, third in thirds}
    m: dict[nn.Module, list[Tensor]] = {}
    for step, (x, y) in enumerate(data):
        model.zero_grad()
        output = model(x)
        for _, _, out in model.seen:
            out.retain_grad()
        F.cross_entropy(output, y).backward()
        for layer, seen, out in model.seen:
            blocks[layer].see(seen, out.grad)
            blocks[layer].update(step, ekfac)
            pushed = [p.grad + decay * p.detach() for p in layer.parameters()]
            before = m.get(layer, [torch.zeros_like(g) for g in pushed])
            m[layer] = [momentum * a + b for a, b in zip(before, pushed, strict=True)]
            for p, change in zip(layer.parameters(), blocks[layer].precondition(m[layer]), strict=True):
                p.data -= OPTIONS["lr"] * change
    return [p.detach() for p in model.parameters()]


def ours(**options: Any) -> list[Tensor]:
    model, data = start()
    opt = OCNOpt(
        model.parameters(), model=model, curvature="kronecker", feedback="off", ema=False, **OPTIONS, **options
    )
    for x, y in data:
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.7, 0.03)])
@pytest.mark.parametrize("ekfac", [False, True])
@pytest.mark.parametrize("every", [3, 12])
def test_equals_kfac_written_by_hand(every: int, ekfac: bool, momentum: float, decay: float) -> None:
    found = ours(ekfac=ekfac, momentum=momentum, weight_decay=decay, refresh_every=every)
    torch.testing.assert_close(found, by_hand(ekfac, momentum, decay, every), rtol=1e-8, atol=1e-8)


def test_ekfac_and_kfac_are_not_the_same() -> None:
    assert not torch.allclose(by_hand(True, 0.0, 0.0)[0], by_hand(False, 0.0, 0.0)[0], rtol=1e-4)


@pytest.mark.parametrize("bellman", ["consistent", "paper"])
def test_pieces_add_up_to_the_whole(bellman: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose windows are too large for one piece gets the same step."""
    from ocnopt.layers import outer

    steps = []
    for numbers in (1 << 22, 64):
        monkeypatch.setattr(outer, "CACHED", numbers)
        torch.manual_seed(0)
        # fewer features than samples: in a null space of the factors any basis is as good as any other
        net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)).double()
        opt = OCNOpt(net.parameters(), model=net, curvature="kronecker", bellman=bellman, refresh_every=2)
        for seed in range(3):
            x = torch.randn(7, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
        steps.append([p.detach().clone() for p in net.parameters()])
    for whole, pieces in zip(*steps, strict=True):
        assert torch.allclose(whole, pieces, rtol=1e-8)

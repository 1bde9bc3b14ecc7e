"""Networks with branches, written a second time as Markov chains: the state of a stage is everything still needed.

That second form is what the dense solver takes, and it is all the tests know of stages and live edges.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention

CLASSES, WIDTH = 3, 4
#: (run a player, state) → state
Stage = Callable[[Callable[[str, Tensor], Tensor], Tensor], Tensor]


def pack(*tensors: Tensor) -> Tensor:
    return torch.cat([t.flatten(1) for t in tensors], 1)


def unpack(X: Tensor, *shapes: tuple[int, ...]) -> list[Tensor]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [t.unflatten(1, shape) for t, shape in zip(X.split(sizes, 1), shapes, strict=True)]


@dataclass
class Chain:
    """``players[k]``: the names of the modules of stage k."""

    players: list[list[str]]
    stages: list[Stage]

    def layers(self, model: nn.Module) -> tuple[list[Callable[[Tensor, Tensor], Tensor]], list[Tensor]]:
        """(f_k, θ_k) of all stages."""
        fs, thetas = [], []
        for names, stage in zip(self.players, self.stages, strict=True):
            f, theta = _layer(model, names, stage)
            fs.append(f)
            thetas.append(theta)
        return fs, thetas

    def sizes(self, model: nn.Module) -> list[list[int]]:
        return [[sum(p.numel() for p in model.get_submodule(n).parameters()) for n in names] for names in self.players]


def _layer(model: nn.Module, names: list[str], stage: Stage) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
    named = [(name, own, p) for name in names for own, p in model.get_submodule(name).named_parameters()]
    theta = torch.cat([p.detach().flatten() for _, _, p in named])

    def f(X: Tensor, theta: Tensor) -> Tensor:
        values: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        for (name, own, p), v in zip(named, theta.split([p.numel() for _, _, p in named]), strict=True):
            values[name][own] = v.view_as(p)
        return stage(lambda name, x: functional_call(model.get_submodule(name), values[name], (x,)), X)

    return f, theta.clone()


# --- residual blocks ---


class Residual(nn.Module):
    """One block. The skip connection is called last, as in many codes, and may have parameters."""

    def __init__(self, projection: bool, linear: bool = False) -> None:
        super().__init__()
        self.into, self.a, self.b = nn.Linear(5, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.skip = nn.Linear(WIDTH, WIDTH) if projection else nn.Identity()
        self.act: Callable[[Tensor], Tensor] = nn.Identity() if linear else nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        z = self.act(self.into(x))
        out = self.b(self.act(self.a(z)))
        out += self.skip(z)
        return self.head(self.act(out))


def residual_chain(model: Residual, late: int | None) -> Chain:
    """``late``: of the skip module; ``None``: it has no parameters."""
    act = model.act
    first = late == 0
    skip = [["skip"] if late == k else [] for k in (0, 1)]

    def split(p: Callable[[str, Tensor], Tensor], z: Tensor) -> Tensor:
        return pack(act(p("a", z)), p("skip", z) if first else z)

    def merge(p: Callable[[str, Tensor], Tensor], X: Tensor) -> Tensor:
        h, e = unpack(X, (WIDTH,), (WIDTH,))
        return act(p("b", h) + (e if first or late is None else p("skip", e)))

    return Chain(
        [["into"], ["a", *skip[0]], ["b", *skip[1]], ["head"]],
        [lambda p, x: act(p("into", x)), split, merge, lambda p, x: p("head", x)],
    )


class Normed(nn.Module):
    """A residual block with norms after its layers, on the skip connection and after the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.n0 = nn.Linear(5, WIDTH), nn.LayerNorm(WIDTH)
        self.a, self.n1 = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH, eps=1e-3)
        self.b, self.skip, self.n2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.n3, self.head = nn.GroupNorm(1, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.n0(self.into(x)))
        out = self.b(torch.tanh(self.n1(self.a(z))))
        out = out + self.n2(self.skip(z))
        return self.head(torch.tanh(self.n3(out)))


def normed_chain(late: int) -> Chain:
    """A norm acts with the layer before it, wherever that is; the one after the sum with the later of two."""
    skip = [["skip", "n2"] if late == k else [] for k in (0, 1)]

    def into(p: Callable[[str, Tensor], Tensor], x: Tensor) -> Tensor:
        return torch.tanh(p("n0", p("into", x)))

    def split(p: Callable[[str, Tensor], Tensor], z: Tensor) -> Tensor:
        return pack(torch.tanh(p("n1", p("a", z))), z if late else p("n2", p("skip", z)))

    def merge(p: Callable[[str, Tensor], Tensor], X: Tensor) -> Tensor:
        h, e = unpack(X, (WIDTH,), (WIDTH,))
        return torch.tanh(p("n3", p("b", h) + (p("n2", p("skip", e)) if late else e)))

    return Chain(
        [["into", "n0"], ["a", "n1", *skip[0]], ["b", *skip[1], "n3"], ["head"]],
        [into, split, merge, lambda p, x: p("head", x)],
    )


# --- an inception block ---


def pool(z: Tensor) -> Tensor:
    left, right = z.chunk(2, 1)
    return torch.cat([torch.maximum(left, right), left * right], 1)


class Inception(nn.Module):
    """Four paths; the code runs one after another. Two of them are short and can wait."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(5, WIDTH)
        self.one, self.pooled = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)
        self.three = nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 2))
        self.five = nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh(), nn.Linear(2, 3))
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.into(x))
        paths = [self.one(z), self.three(z), self.five(z), self.pooled(pool(z))]
        return self.head(torch.tanh(torch.cat(paths, 1)))


def inception_chain(late: bool) -> Chain:
    def into(p: Callable[[str, Tensor], Tensor], x: Tensor) -> Tensor:
        z = torch.tanh(p("into", x))
        return pack(z, pool(z))  # operations run as soon as they can

    def split(p: Callable[[str, Tensor], Tensor], X: Tensor) -> Tensor:
        z, pooled = X.chunk(2, 1)
        short = (z, pooled) if late else (p("one", z), p("pooled", pooled))
        return pack(torch.tanh(p("three.0", z)), torch.tanh(p("five.0", z)), *short)

    def merge(p: Callable[[str, Tensor], Tensor], X: Tensor) -> Tensor:
        width = WIDTH if late else 2
        three, five, one, pooled = unpack(X, (3,), (2,), (width,), (width,))
        one, pooled = (p("one", one), p("pooled", pooled)) if late else (one, pooled)
        return torch.tanh(torch.cat([one, p("three.2", three), p("five.2", five), pooled], 1))

    short = ["one", "pooled"]
    return Chain(
        [
            ["into"],
            ["three.0", "five.0", *([] if late else short)],
            ["three.2", "five.2", *(short if late else [])],
            ["head"],
        ],
        [into, split, merge, lambda p, x: p("head", x)],
    )


# --- attention ---


class Attention(nn.Module):
    """q, k and v are three players of one stage; the stream goes by."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.head = nn.Linear(2, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.into(x))
        z = z + self.out(scaled_dot_product_attention(self.q(z), self.k(z), self.v(z)))
        return self.head(z.mean(1))


TOKENS = 3


def attention_chain() -> Chain:
    tokens = (TOKENS, WIDTH)

    def attend(p: Callable[[str, Tensor], Tensor], X: Tensor) -> Tensor:
        (z,) = unpack(X, tokens)
        # the state after the players is what the operations can make of their outputs at once
        return pack(scaled_dot_product_attention(p("q", z), p("k", z), p("v", z)), z)

    def merge(p: Callable[[str, Tensor], Tensor], X: Tensor) -> Tensor:
        mixed, z = unpack(X, tokens, tokens)
        return (z + p("out", mixed)).mean(1)

    return Chain(
        [["into"], ["q", "k", "v"], ["out"], ["head"]],
        [lambda p, x: pack(torch.tanh(p("into", x))), attend, merge, lambda p, x: p("head", x)],
    )


# --- a DenseNet block ---


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.a, self.b = nn.Linear(5, 3), nn.Linear(3, 2), nn.Linear(5, 2)
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = self.into(x)
        z = torch.cat([z, torch.tanh(self.a(torch.tanh(z)))], 1)
        z = torch.cat([z, torch.tanh(self.b(torch.tanh(z)))], 1)
        return self.head(z)


def dense_chain() -> Chain:
    def grow(name: str) -> Stage:
        # the input of the layer and what goes by it are two edges, though both come from z
        def stage(p: Callable[[str, Tensor], Tensor], X: Tensor) -> Tensor:
            read, z = X.chunk(2, 1)
            z = torch.cat([z, torch.tanh(p(name, read))], 1)
            return pack(torch.tanh(z), z) if name == "a" else z

        return stage

    def into(p: Callable[[str, Tensor], Tensor], x: Tensor) -> Tensor:
        z = p("into", x)
        return pack(torch.tanh(z), z)

    return Chain([["into"], ["a"], ["b"], ["head"]], [into, grow("a"), grow("b"), lambda p, x: p("head", x)])

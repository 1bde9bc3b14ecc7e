"""Small networks, batches and loops that many tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ocnopt import OCNOpt
from ocnopt.diagnostics import Diagnostics

B, FEATURES, CLASSES = 6, 5, 3

CURVATURES = ("identity", "adaptive", "kronecker")
FEEDBACKS = ("linear", "nonlinear")
RANKS = (1, 3, "full")
BELLMANS = ("consistent", "paper")

#: every way to play
GAMES: list[dict[str, Any]] = [
    {"curvature": c, "feedback": f, "rank": r, "bellman": b}
    for c, f, r, b in product(CURVATURES, FEEDBACKS, RANKS, BELLMANS)
]
#: the corners of it: what reads nothing but p.grad, what reads single samples, what runs the model again
SOME_GAMES: list[dict[str, Any]] = [
    {"curvature": "adaptive", "feedback": "linear", "rank": 1},
    {"curvature": "identity", "feedback": "linear", "rank": 3},
    {"curvature": "kronecker", "feedback": "linear", "rank": "full", "bellman": "paper"},
    {"curvature": "adaptive", "feedback": "nonlinear", "rank": 1, "bellman": "paper"},
    {"curvature": "kronecker", "feedback": "nonlinear", "rank": 3},
]


def name_of(game: dict[str, Any]) -> str:
    return "-".join(str(v) for v in game.values())


def mlp(*, width: int = 4, depth: int = 3, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = [FEATURES, *[width] * (depth - 1), CLASSES]
    layers = [nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in pairwise(sizes)]
    return nn.Sequential(*layers[:-1], layers[-1][0]).to(dtype)


def batches(
    n: int = 1, *, size: int = B, dtype: torch.dtype = torch.float64, seed: int = 1
) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    draw = lambda: torch.randn(size, FEATURES, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    return [(draw(), torch.randint(CLASSES, (size,), generator=g)) for _ in range(n)]


def backward(model: nn.Module, x: Any, y: Tensor) -> Tensor:
    loss = cross_entropy(model(x), y)
    loss.backward()
    return loss


def train(model: nn.Module, opt: torch.optim.Optimizer, data: Iterable[tuple[Any, Tensor]]) -> list[float]:
    """The drop-in loop. Returns the losses."""
    losses = []
    for x, y in data:
        opt.zero_grad()
        losses.append(backward(model, x, y).item())
        opt.step()
    return losses


def values(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters and buffers."""
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def state_of(opt: OCNOpt) -> list[dict[str, Any]]:
    """A copy of the optimizer's state, parameter by parameter."""
    params = [p for group in opt.param_groups for p in group["params"]]
    copy = lambda v: v.detach().clone() if isinstance(v, Tensor) else v  # noqa: E731
    return [{k: copy(v) for k, v in opt.state.get(p, {}).items()} for p in params]


def assert_identical(ours: Any, theirs: Any) -> None:
    """Bit for bit."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def differ(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def predicted(found: Diagnostics) -> Tensor:
    """s of each layer as the kernels of the step predict it: what the layers of earlier stages change."""
    K, u = found.kernels.taken
    changes, stage = -(torch.einsum("nij,nj->ni", K, found.w) + u), torch.tensor(found.stage_of)
    return torch.stack([changes[stage < k].sum(0) for k in stage])


def hooks_on(model: nn.Module) -> int:
    """Forward hooks and pre-hooks of a model and all its modules."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def on_every_call(module: nn.Module, look: Callable[[Any], Any]) -> None:
    """Show ``look`` what the module returns, each time it runs: hooks that only look are not called a second time."""
    forward = module.forward

    def seen(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        look(out)
        return out

    module.forward = seen  # type: ignore[method-assign]


def cycle(data: list[Any], n: int) -> Iterator[Any]:
    return (data[i % len(data)] for i in range(n))

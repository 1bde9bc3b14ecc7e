"""``torch.func``, a forward pass that fails: what is no training leaves no trace on the tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.toys import SOME_GAMES, assert_identical, backward, batches, mlp, name_of, values
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from ocnopt import OCNOpt


def _gradients(model: nn.Module, x: Tensor) -> Any:
    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(model, parameters, (sample[None],)).square().sum()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return vmap(grad(loss), (None, 0))(parameters, x)


def _directions(model: nn.Module, x: Tensor) -> Any:
    return jvp(model, (x,), (torch.ones_like(x),))


def _fails(model: nn.Module, x: Tensor) -> Any:
    with pytest.raises(RuntimeError, match="shapes"):
        model(x[:, 1:])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, for derivatives forward
@pytest.mark.parametrize("between", [_gradients, _directions, _fails])
@pytest.mark.parametrize("game", [*SOME_GAMES, {"bellman": "paper", "curvature": "identity"}], ids=name_of)
def test_between_backward_and_step(game: dict[str, Any], between: Callable[[nn.Module, Tensor], Any]) -> None:
    found = []
    for disturbed in (False, True):
        model = mlp()
        opt = OCNOpt(model.parameters(), 0.05, model=model, **game)
        for x, y in batches(3):
            opt.zero_grad()
            backward(model, x, y)
            if disturbed:
                between(model, x)
            opt.step()
        found.append(values(model))
    assert_identical(*found)

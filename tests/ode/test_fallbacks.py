"""What stands in where the layers of a block cannot be looked at, for how long, and what is said about it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from tests.ode.fields import Net, batch, loss_of, network, optimizer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ocnopt import OCNOpt
from ocnopt.hosts import CannotTell
from ocnopt.ode import NeuralODE

B, RATE = 5, 1e-6  # a rate too small to lead anywhere
FEW: dict[str, Any] = {"solver": "rk4", "options": {"step_size": 0.5}}


def step(model: nn.Module, opt: OCNOpt, seed: int = 0, x: Tensor | None = None) -> None:
    opt.zero_grad(set_to_none=False)
    loss_of(model, batch(B, seed=seed) if x is None else x).backward()
    opt.step()


def curvatures(opt: OCNOpt) -> dict[str, str]:
    return {p.name: p.curvature.name for p in opt._seated if "field" in p.name}


KRONECKER = {"2.field.one": "kronecker", "2.field.two": "kronecker"}
ADAPTIVE = dict.fromkeys(KRONECKER, "adaptive")


class Skipping(nn.Module):
    """Leaves the block out in some steps."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = network(NeuralODE(Net(), **FEW))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        out: Tensor = self.layers[3](x if self.skips else self.layers[2](x))
        return out


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.filterwarnings("ignore:.*its calls were not seen")
def test_a_step_without_the_block_leaves_no_trace(odd: int) -> None:
    model = Skipping()
    opt, seen = optimizer(model, refresh_every=3, lr=RATE), []
    for p in model.parameters():  # a gradient of zeros, as ``zero_grad(set_to_none=False)`` leaves it
        p.grad = torch.zeros_like(p)
    for i in range(6):
        model.skips = i == odd
        step(model, opt, i)
        seen.append(set(curvatures(opt).values()))
    assert [i for i, kinds in enumerate(seen) if kinds != {"kronecker"}] == [odd]


class Transposing(Net):
    """In some steps the layers of the field see no samples in dimension 0."""

    odd = False

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        out = super().forward(t, torch.cat([x, x]) if self.odd else x)
        return out[: len(x)]


@pytest.mark.filterwarnings("ignore:.*does not run over the samples")
def test_one_odd_look_leaves_no_trace() -> None:
    model = network(NeuralODE(Transposing(), **FEW))
    opt, seen = optimizer(model, refresh_every=2, lr=RATE), []
    for i in range(6):
        model[2].field.odd = i == 2
        step(model, opt, i)
        seen.append(curvatures(opt))
    assert seen == [KRONECKER, KRONECKER, ADAPTIVE, KRONECKER, KRONECKER, KRONECKER]


@pytest.mark.filterwarnings("ignore:.*does not run over the samples")
def test_what_never_can_be_read_is_looked_at_less_and_less_often() -> None:
    model = network(NeuralODE(Transposing(), **FEW))
    model[2].field.odd = True
    opt, looked = optimizer(model, refresh_every=6, lr=RATE), []
    for i in range(30):
        model[2].nfe.reset()
        step(model, opt, i)
        assert curvatures(opt) == ADAPTIVE
        if model[2].nfe.curvature:
            looked.append(i)
    assert looked == [0, 1, 3, 6, 11, 17, 23, 29]


class Blind(NeuralODE):
    """A block the look at which fails."""

    def layer_calls(self, *args: Any) -> Any:
        self.asked = getattr(self, "asked", 0) + 1
        raise CannotTell("it will not")


def test_a_look_that_fails_is_not_tried_at_every_step_and_names_the_block() -> None:
    block = Blind(Net(), **FEW)
    opt = optimizer(block, lr=RATE)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(8):
            step(block, opt, i)
    assert block.asked == 4  # steps 0, 1, 3, 6
    assert str(said[0].message) == "Blind: what its layers saw is not known: it will not"
    assert str(said[1].message) == "field.one: it will not; its curvature is adaptive"


def test_as_many_times_as_samples() -> None:
    times = tuple(k / (B - 1) for k in range(B))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ode, self.head = NeuralODE(Net(), t=times, all_times=True), nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.ode(x).transpose(0, 1))
            return out

    model = Model()
    opt = optimizer(model)
    step(model, opt)
    assert set(curvatures(opt).values()) == {"kronecker"}


@pytest.mark.parametrize("gradient", ["adjoint", "discretize"])
@pytest.mark.parametrize("all_times", [False, True])
@pytest.mark.parametrize("tupled", [False, True])
def test_an_activation_in_place_right_after_the_block(gradient: str, all_times: bool, tupled: bool) -> None:
    class Tupled(Net):
        def forward(self, t: Tensor, x: Any) -> Any:
            return (super().forward(t, x[0]),) if tupled else super().forward(t, x)

    class Model(nn.Module):
        def __init__(self, act: nn.Module) -> None:
            super().__init__()
            self.ode = NeuralODE(Tupled(), gradient=gradient, all_times=all_times, **FEW)
            self.act = act

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.act(self.ode((x,))[0] if tupled else self.ode(x))
            return out

    factors, grads = [], []
    for inplace in (True, False):
        model = Model(nn.ReLU(inplace=inplace))
        opt = optimizer(model, lr=RATE)
        step(model, opt)
        assert set(curvatures(opt).values()) == {"kronecker"}
        factors.append(opt.state[model.ode.field.one.weight]["output_factor"])
        grads.append(model.ode.field.one.weight.grad)
    assert torch.equal(*grads)
    assert torch.equal(*factors)
    assert factors[0].abs().max() > 0


# --- layers that are called by others, too ---


class Tied(nn.Module):
    """A layer of the field, or all of it, is used again outside of the block."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.ode, self.which = NeuralODE(Net(hidden=3), **FEW), which

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ode(x)
        if self.which == "layer":
            out = self.ode.field.two(out)
        if self.which == "field":
            out = out + self.ode.field(torch.ones((), dtype=out.dtype), out)
        return out


@pytest.mark.parametrize(("which", "outside"), [("layer", ["two"]), ("field", ["one", "two"]), ("none", [])])
def test_layers_that_are_called_outside_of_the_block_as_well(which: str, outside: list[str]) -> None:
    model = Tied(which)
    opt = optimizer(model, lr=RATE)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(model, opt)
    why = "it is also called outside of ode, where it is not seen; its curvature is adaptive"
    assert [str(w.message) for w in said] == [f"ode.field.{name}: {why}" for name in outside]
    expected = {f"ode.field.{n}": "adaptive" if n in outside else "kronecker" for n in ("one", "two")}
    assert curvatures(opt) == expected


class Normed(Net):
    """With a layer that has adaptive curvature anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3).double()

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.norm(super().forward(t, x))


@pytest.mark.parametrize(("curvature", "frozen"), [("kronecker", False), ("kronecker", True), ("adaptive", False)])
def test_layers_that_several_blocks_run(curvature: str, frozen: bool) -> None:
    field = Normed().requires_grad_(not frozen)
    model = nn.Sequential(NeuralODE(field, **FEW), NeuralODE(field, t=(1.0, 2.0), **FEW), nn.Linear(3, 2).double())
    opt = optimizer(model, lr=RATE, curvature=curvature)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        opt.summary()
        for i in range(2):
            step(model, opt, i)
    why = "0.field.one, 0.field.two: several modules run them, 0 and 1; their curvature is adaptive"
    assert [str(w.message) for w in said] == [why] * (curvature == "kronecker" and not frozen)


def test_calls_that_train_nothing_or_repeat_the_blocks_own_do_not_count() -> None:
    class Checkpointed(Net):
        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            return checkpoint(super().forward, t, x, use_reentrant=False)

    model = network(NeuralODE(Checkpointed(), gradient="discretize", **FEW))
    opt = optimizer(model, lr=RATE)
    with torch.no_grad():
        model[2].field(torch.zeros((), dtype=torch.float64), batch(B))
    step(model, opt)
    assert curvatures(opt) == KRONECKER


def test_a_layer_that_was_called_elsewhere_once_is_looked_at_again() -> None:
    model = Tied("layer")
    opt, seen = optimizer(model, lr=RATE, refresh_every=2), []
    for i in range(4):
        model.which = "layer" if i == 2 else "none"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(model, opt, i)
        seen.append(curvatures(opt)["ode.field.two"])
    assert seen == ["kronecker", "kronecker", "adaptive", "kronecker"]
    copied = copy.deepcopy(model)
    copied.ode.field.two(batch(B))
    assert copied.ode.take_strays() == model.ode.take_strays() == frozenset()
    opt.detach()
    model.ode.field.two(batch(B))
    assert model.ode.take_strays() == frozenset()


@pytest.mark.parametrize("solve", [{}, FEW])
@pytest.mark.parametrize("gradient", ["adjoint", "discretize"])
def test_an_empty_batch(solve: dict[str, Any], gradient: str) -> None:
    model = network(NeuralODE(Net(), gradient=gradient, t=(0.0, 0.5, 1.0), **solve))
    opt = optimizer(model)
    assert model[2](batch(0), all_times=True).shape == (3, 0, 3)
    model(batch(0)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))

"""At rank > 1 the gradients of groups of samples are the gradient: the backward pass computes them, and their sum is
``p.grad``. All numbers are those of autograd, and of group gradients computed in the step, up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.toys import values
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.parametrizations import weight_norm
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from ocnopt import OCNOpt
from ocnopt.layers.linear import LinearAdapter
from ocnopt.once import nothing_else

NETS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)), (5,)),
    "tokens": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), (4, 5)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3, stride=2), nn.Tanh(), nn.Conv1d(4, 2, 2, groups=2)), (2, 9)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3)), (1, 6, 5)),
    "valid": (lambda: nn.Sequential(nn.Conv2d(3, 4, 2, dilation=2, padding="valid"), nn.Tanh()), (3, 6, 5)),
    "norm": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh()), (1, 6, 5)),
    "one pixel": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh()), (3, 1, 1)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 3, 2, padding=(1, 0, 1), bias=False), nn.Tanh()), (2, 3, 4, 3)),
}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def samples(batch: int = 8, *shape: int) -> Tensor:
    return torch.randn(batch, *(shape or (5,))).double()


def loss(out: Tensor) -> Tensor:
    """A mean over samples."""
    rows = out.flatten(1)
    return (rows.sum(1).tanh() + rows.square().sum(1)).mean()


def game(model: nn.Module, in_backward: bool = True, **options: Any) -> OCNOpt:
    """``in_backward=False``: group gradients are computed in the step."""
    chosen: dict[str, Any] = {"curvature": "adaptive", "rank": 4, "eps": 1e-2} | options
    opt = OCNOpt(model.parameters(), 0.05, model=model, **chosen)
    if not in_backward:
        assert opt._tape is not None
        opt._tape.once.adapters = {}
    return opt


def split(opt: OCNOpt) -> list[str]:
    """The layers whose gradients the backward pass left split."""
    assert opt._tape is not None
    return sorted(record.name for record in opt._tape.records if record.columns)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same_steps(build: Callable[[], nn.Module], train: Callable[[nn.Module, OCNOpt], None], **options: Any) -> None:
    """Whether group gradients are computed in the backward pass or in the step."""
    torch.manual_seed(0)
    model, found = build().double(), []
    for in_backward in (True, False):
        mine = copy.deepcopy(model)
        torch.manual_seed(1)
        train(mine, game(mine, in_backward, **options))
        found.append(values(mine))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rank", [2, 8, "full"])
@pytest.mark.parametrize("batch", [8, 11])
@pytest.mark.parametrize("name", NETS)
def test_every_layer(name: str, batch: int, rank: int | str) -> None:
    build, shape = NETS[name]

    def train(model: nn.Module, opt: OCNOpt) -> None:
        assert isinstance(model, nn.Sequential)
        assert opt._tape is not None
        layers = [i for i, layer in enumerate(model) if list(layer.parameters())]
        for _ in range(2):
            x, plain = samples(batch, *shape), copy.deepcopy(model)
            opt.zero_grad()
            plain.zero_grad()
            loss(model(x)).backward()
            loss(plain(x)).backward()
            torch.testing.assert_close(gradients(model), gradients(plain))
            assert split(opt) == [str(i) for i in layers if opt._tape.once.adapters]
            opt.step()

    for options in ({"feedback": "linear"}, {"feedback": "nonlinear", "curvature": "kronecker"}):
        same_steps(build, train, rank=rank, **options)


def test_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step asks no layer for gradients again."""
    asked, compute = [], LinearAdapter.group_gradients
    monkeypatch.setattr(
        LinearAdapter, "group_gradients", lambda *given: (asked.append(given[1].module), compute(*given))[1]
    )
    model = mlp().double()
    opt = game(model)
    loss(model(samples())).backward()
    opt.step()
    assert asked == [model[2], model[0]]


def test_nothing_changes_at_rank_one() -> None:
    model = mlp().double()
    opt = game(model, rank=1, feedback="nonlinear")
    out = model(samples())
    loss(out).backward()
    assert split(opt) == []
    assert "Product" not in str(out.grad_fn.next_functions[0][0])  # type: ignore[union-attr]


@pytest.mark.parametrize("curvature", ["identity", "adaptive"])
def test_the_gram_form_stores_no_gradients(curvature: str) -> None:
    """With identity curvature the kernels of a wide layer come from inputs and adjoints."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 200), nn.Tanh(), nn.Linear(200, 2))

    def train(model: nn.Module, opt: OCNOpt) -> None:
        assert opt._tape is not None
        loss(model(samples())).backward()
        assert split(opt) == (["0", "2"] if opt._tape.once.adapters and curvature == "adaptive" else [])
        opt.step()

    same_steps(build, train, rank="full", curvature=curvature)


def test_outputs_overwritten_in_place() -> None:
    """Of a layer with tokens the output is a view of what the product made, which others may overwrite all the same."""
    model, x = nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3)).double(), samples(8, 4, 5)
    plain, opt = copy.deepcopy(model), game(model)
    loss(model(x)).backward()
    loss(plain(x)).backward()
    torch.testing.assert_close(gradients(model), gradients(plain))
    assert split(opt) == ["0", "2"]


@pytest.mark.parametrize("name", ["linear", "tokens", "conv2d"])
def test_differentiated_twice(name: str) -> None:
    """A gradient penalty: what the backward pass did is differentiated again, with respect to weights too."""
    build, shape = NETS[name]

    def backward(model: nn.Module, x: Tensor) -> None:
        x = x.clone().requires_grad_()
        value = loss(model(x))
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        steepness = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        (value + slope.square().sum() + sum(g.square().sum() for g in steepness)).backward()

    torch.manual_seed(0)
    model, x = build().double(), samples(8, *shape)
    plain, opt = copy.deepcopy(model), game(model)
    backward(model, x)
    backward(plain, x)
    assert split(opt) != []
    torch.testing.assert_close(gradients(model), gradients(plain))

    def train(model: nn.Module, opt: OCNOpt) -> None:
        backward(model, x)
        opt.step()

    same_steps(build, train)


def test_what_is_not_training_is_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of inputs ask nothing of the layers, and a look at gradients after ``backward()`` adds nothing."""
    model = mlp().double()
    opt, x = game(model), samples().requires_grad_()
    value = loss(model(x))
    with monkeypatch.context() as patch:
        patch.setattr(LinearAdapter, "group_gradients", None)
        torch.autograd.grad(value, x, retain_graph=True)
    value.backward(retain_graph=True)
    torch.autograd.grad(value, list(model.parameters()))
    assert opt._tape is not None
    for record in opt._tape.records:
        for name, p in record.module.named_parameters():
            torch.testing.assert_close(record.columns[name].sum(0), p.grad)


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"feedback": "off", "curvature": "kronecker"}], ids=str)
def test_where_groups_are_not_known_or_not_wanted(options: dict[str, Any]) -> None:
    model = mlp().double()
    opt = game(model, **options)
    loss(model(samples())).backward()
    assert split(opt) == []


def test_gradients_of_parameters() -> None:
    model, x = mlp().double(), samples()
    plain, opt = copy.deepcopy(model), game(model)
    found = (torch.autograd.grad(loss(each(x)), list(each.parameters())) for each in (model, plain))
    torch.testing.assert_close(*found)
    assert split(opt) == ["0", "2"]  # it may be training by hand


def test_two_backward_passes() -> None:
    def train(model: nn.Module, opt: OCNOpt) -> None:
        out = model(samples())
        loss(out).backward(retain_graph=True)
        out.square().sum(1).mean().backward()
        opt.step()

    same_steps(mlp, train)


def test_several_passes() -> None:
    """The groups of a step are known when its last pass is over; after such a step nothing is split beforehand."""

    def train(model: nn.Module, opt: OCNOpt) -> None:
        assert opt._tape is not None
        counts = []
        for passes in (2, 3, 1, 1):
            opt.zero_grad()
            for i in range(passes):
                loss(model(samples(6 + i))).backward()
                counts.append(len(split(opt)))
            opt.step()
        assert counts == ([2, 0, 0, 0, 0, 0, 2] if opt._tape.once.adapters else [0] * 7)

    same_steps(mlp, train)


def test_one_backward_pass_through_two_passes() -> None:
    def train(model: nn.Module, opt: OCNOpt) -> None:
        (loss(model(samples(6))) + loss(model(samples(9)))).backward()
        assert split(opt) == []
        opt.step()

    same_steps(mlp, train)


def test_a_layer_used_twice_and_a_tied_weight() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]

    def train(model: nn.Module, opt: OCNOpt) -> None:
        assert opt._tape is not None
        loss(model(samples())).backward()
        assert len(split(opt)) == (3 if opt._tape.once.adapters else 0)
        opt.step()

    same_steps(Net, train)


@pytest.mark.parametrize("options", [{"maximize": True}, {"feedback": "nonlinear", "curvature": "identity"}, {}])
def test_scaled_and_clipped(options: dict[str, Any]) -> None:
    """As a ``GradScaler`` does; and columns add up to what ``p.grad`` has become."""

    def train(model: nn.Module, opt: OCNOpt) -> None:
        (1024 * loss(model(samples()))).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad /= 1024
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        opt.step()

    same_steps(mlp, train, **options)


def _scale(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad *= 0.5


def _replace(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = 0.5 * p.grad


def _secretly(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.data[1:] = 0  # which counts as nothing


TOUCHES: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    # what is done to the model before the pass, and between the backward pass and the step
    "nothing": (lambda model: None, lambda model: None),
    "scaled": (lambda model: None, _scale),
    "replaced": (lambda model: None, _replace),
    "behind its back": (lambda model: None, _secretly),
    "clipped": (lambda model: None, lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01)),
    "hooked": (lambda model: [p.register_hook(lambda g: g + 0.01) for p in model.parameters()], lambda model: None),
    "there before": (lambda model: sum(p.square().sum() for p in model.parameters()).backward(), lambda model: None),
}


@pytest.mark.parametrize("form", ["identity", "gram", "adaptive"])
@pytest.mark.parametrize("touch", [*TOUCHES, "penalty"])
def test_columns_are_left_as_they_are_only_if_nobody_touched_the_gradient(
    touch: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = TOUCHES.get(touch, TOUCHES["nothing"])
    monkeypatch.setattr(LinearAdapter, "prefers_gram", lambda *_: form == "gram")
    known: list[bool] = []
    looks = form == "gram"  # stored gradients of groups are made to add up to whatever is found

    def train(model: nn.Module, opt: OCNOpt) -> None:
        assert opt._tape is not None
        before(model)
        penalty = sum(p.square().sum() for p in model.parameters()) if touch == "penalty" else 0
        (loss(model(samples())) + penalty).backward()
        after(model)
        names = [(r, n, p.grad) for r in opt._tape.records for n, p in r.module.named_parameters()]
        if opt._tape.once.adapters:
            known.extend(nothing_else(*each) for each in names)
            with patch("ocnopt.whole_step.may_look", lambda _: False):  # then nothing is certain
                assert not any(nothing_else(*each) for each in names)
                with patch("ocnopt.whole_step.undisturbed", lambda: True):  # but that nobody has come between
                    unseen = looks and touch in ("nothing", "behind its back")
                    assert [nothing_else(*each) for each in names] == [unseen] * 4
        opt.step()

    same_steps(mlp, train, feedback="linear", curvature="adaptive" if form == "adaptive" else "identity")
    assert known == [looks and touch == "nothing"] * 4


def test_a_bad_batch_leaves_no_trace() -> None:
    model = mlp().double()
    opt, before = game(model), values(model)
    x = samples()
    x[3] = torch.inf
    loss(model(x)).backward()
    opt.step()
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)


def test_rows_that_are_not_samples() -> None:
    """As many features as samples: only the step finds out."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.T).T  # type: ignore[no-any-return]

    def train(model: nn.Module, opt: OCNOpt) -> None:
        loss(model(samples(8, 8))).backward()
        with pytest.warns(UserWarning, match="does not run over the samples"):
            opt.step()

    same_steps(Turned, train)


def left_alone(model: nn.Module, x: Tensor) -> None:
    """Autograd does all of it."""
    plain, opt = copy.deepcopy(model), game(model)
    loss(model(x)).backward()
    loss(plain(x)).backward()
    assert split(opt) == []
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=0, atol=0)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 3, 3, padding="same"),
        nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        nn.ConvTranspose2d(2, 3, 3),
        weight_norm(nn.Conv2d(2, 3, 3)),
        nn.Conv2d(2, 3, 3).requires_grad_(False),
    ],
    ids=["same", "circular", "transposed", "parametrised", "frozen"],
)
def test_other_layers_are_left_alone(layer: nn.Module) -> None:
    left_alone(nn.Sequential(layer, nn.GroupNorm(1, 3)).double(), samples(8, 2, 5, 5))


def test_what_is_saved_for_the_backward_pass_may_be_counted() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]

    left_alone(Net().double(), samples())


def test_low_precision_is_left_alone() -> None:
    model = mlp()
    opt = game(model)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(samples().float())
    loss(out.float()).backward()
    assert split(opt) == []
    left_alone(mlp().bfloat16(), samples().bfloat16())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own
def test_forward_derivatives() -> None:
    model = mlp().double()
    opt = game(model)
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(samples(), samples()))
        assert forward_ad.unpack_dual(out).tangent is not None
    assert opt._tape is not None


def test_the_first_weight_may_be_overwritten_before_the_backward_pass() -> None:
    """As long as nobody wants the gradient of its input."""
    model = mlp().double()
    opt = game(model)
    value = loss(model(samples()))
    with torch.no_grad():
        model[0].weight.mul_(2)
    value.backward()
    assert split(opt) == ["0", "2"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_layer_that_fails_leaves_nothing_behind(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp().double()
    opt = game(model)

    def fail(*given: Any) -> None:
        raise error

    monkeypatch.setattr(LinearAdapter, "call_refusal", fail)
    with pytest.raises(error):
        model(samples())
    monkeypatch.undo()
    opt.zero_grad()
    assert not _get_current_function_mode_stack()
    loss(model(samples())).backward()
    assert split(opt) == ["0", "2"]

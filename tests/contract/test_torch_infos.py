"""What PyTorch checks of its own optimizers, by way of the descriptions that ship with it.

``OptimizerInfo`` is how torch tells its tests about an optimizer: with which arguments to make one, and which must be
refused. Everything here runs without a model and with one, in the ways of playing that need hooks.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from tests.toys import assert_identical, differ, state_of
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
)

from ocnopt import OCNOpt

# torch's own test helpers forbid to set flags of its backends, for the whole process and all that is tested in it
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

SETTINGS: dict[str, dict[str, Any]] = {
    "bare": {},
    "attached": {"bellman": "paper", "gauss_newton": 0.1},
    "kronecker": {"curvature": "kronecker", "damping": 0.1},
    "rank 3": {"rank": 3, "curvature": "identity"},
    "nonlinear": {"feedback": "nonlinear"},
}


def inputs(device: Any = None, dtype: Any = None) -> list[OptimizerInput]:
    kinds: dict[str, dict[str, Any]] = {
        "default": {},
        "non-default lr": {"lr": 1e-3},
        "Tensor lr": {"lr": torch.tensor(1e-3)},
        "nonzero weight_decay": {"weight_decay": 0.1},
        "decoupled weight_decay": {"weight_decay": 0.1, "decoupled_weight_decay": True},
        "maximize": {"maximize": True},
        "maximize, weight_decay": {"maximize": True, "weight_decay": 0.01},
        "heavy ball": {"momentum": 0.5, "ema": False},
        "nesterov": {"momentum": 0.5, "ema": False, "nesterov": True},
        "no momentum": {"momentum": 0.0},
        "feedback off": {"feedback": "off"},
        "players": {"players": 2},
    }
    return [OptimizerInput(params=None, kwargs=kwargs, desc=desc) for desc, kwargs in kinds.items()]


def error_inputs(device: Any, dtype: Any) -> list[ErrorOptimizerInput]:
    complex_param, sparse_param = torch.rand(2, 3, dtype=torch.complex64), nn.Parameter(torch.rand(2, 3))
    complex_param.grad, sparse_param.grad = torch.rand_like(complex_param), torch.rand(2, 3).to_sparse()
    wrong = [
        ("lr", -1.0, ValueError, "lr must be a number"),
        ("momentum", 1.0, ValueError, "momentum must be a number in"),
        ("gauss_newton", 0.0, ValueError, "gauss_newton must be a number > 0"),
    ]
    steps = [(complex_param, "does not support complex"), (sparse_param, "does not support sparse")]
    return [
        *get_error_inputs_for_all_optims(device, dtype),
        *(
            ErrorOptimizerInput(OptimizerInput(None, {name: value}, name), error_type=error, error_regex=regex)
            for name, value, error, regex in wrong
        ),
        *(
            ErrorOptimizerInput(
                OptimizerInput([param], {}, regex), error_on=OptimizerErrorEnum.STEP_ERROR, error_regex=regex
            )
            for param, regex in steps
        ),
    ]


INFO = OptimizerInfo(
    OCNOpt,
    optim_inputs_func=inputs,
    optim_error_inputs_func=error_inputs,
    scheduler_inputs=(
        [lambda opt: StepLR(opt, gamma=0.9, step_size=10)],
        [lambda opt: ReduceLROnPlateau(opt)],
        [lambda opt: StepLR(opt, gamma=0.9, step_size=10), lambda opt: ExponentialLR(opt, gamma=0.99)],
    ),
    supported_impls=(),
    supports_complex=False,
    supports_sparse=False,
)
CASES = {f"{s}, {i.desc}": (s, i) for s, i in product(SETTINGS, INFO.optim_inputs_func("cpu"))}
cases = pytest.mark.parametrize("case", CASES)
some_cases = pytest.mark.parametrize("case", [f"{s}, {d}" for s, d in product(SETTINGS, ("Tensor lr", "heavy ball"))])
settings = pytest.mark.parametrize("setting", SETTINGS)


class Task:
    """Fit a linear map to nothing; ``contiguous=False``: parameters that are parts of larger tensors."""

    def __init__(self, setting: str, given: OptimizerInput | None = None, *, contiguous: bool = True, **more: Any):
        torch.manual_seed(0)
        self.model = nn.Linear(5, 10)
        if not contiguous:
            self.model.weight = nn.Parameter(torch.randn(10, 5, 2)[..., 0])
            self.model.bias = nn.Parameter(torch.randn(10, 2)[..., 0])
            assert not self.model.weight.is_contiguous()
        self.x = torch.randn(6, 5)
        options = {**SETTINGS[setting], **({} if given is None else copy.deepcopy(given.kwargs)), **more}
        attach = {} if setting == "bare" else {"model": self.model}
        self.opt = OCNOpt(options.pop("params", None) or self.params, **attach, **options)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def closure(self) -> Tensor:
        self.opt.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        return loss

    def run(self, steps: int) -> list[float]:
        return [self.opt.step(self.closure).item() for _ in range(steps)]

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.params]


def test_everything_that_must_be_refused_is() -> None:
    for error_input in INFO.optim_error_inputs_func("cpu", torch.float32):
        given = error_input.optimizer_error_input
        params = given.params if given.params is not None else [nn.Parameter(torch.randn(2, 3))]
        if error_input.error_on is OptimizerErrorEnum.STEP_ERROR:
            opt = OCNOpt(params, **given.kwargs)
            before = [p.detach().clone() for p in params]
            with pytest.raises(error_input.error_type, match=error_input.error_regex):
                opt.step()
            assert_identical([p.detach() for p in params], before)
            assert not any(opt.state.values())
        elif issubclass(error_input.error_type, Warning):
            with pytest.warns(error_input.error_type, match=error_input.error_regex):
                OCNOpt(params, **given.kwargs)
        else:
            with pytest.raises(error_input.error_type, match=error_input.error_regex):
                OCNOpt(params, **given.kwargs)


@cases
def test_goes_in_the_right_direction(case: str) -> None:
    setting, given = CASES[case]
    losses = Task(setting, given).run(20)
    assert (losses[-1] > losses[0]) == given.kwargs.get("maximize", False)


@settings
def test_parameters_need_not_be_contiguous(setting: str) -> None:
    task, plain = Task(setting, contiguous=False), Task(setting)
    plain.model.load_state_dict(task.model.state_dict())
    plain.x = task.x
    torch.testing.assert_close(task.run(5), plain.run(5))
    assert not any(p.is_contiguous() for p in task.params)
    assert all(p.is_contiguous() for p in plain.params)


@settings
@pytest.mark.parametrize("which", range(len(INFO.scheduler_inputs)))
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["float", "tensor"])
def test_with_learning_rate_schedulers(setting: str, which: int, lr: Any) -> None:
    task = Task(setting, lr=copy.deepcopy(lr))
    schedulers = [make(task.opt) for make in INFO.scheduler_inputs[which]]
    losses = []
    for _ in range(20):
        losses += task.run(1)
        for scheduler in schedulers:
            scheduler.step(losses[-1]) if isinstance(scheduler, ReduceLROnPlateau) else scheduler.step()
    assert losses[-1] < losses[0]
    if which != 1:
        assert float(task.opt.param_groups[0]["lr"]) < 0.01


@settings
def test_groups_have_their_own_rates_and_decays(setting: str) -> None:
    task = Task(setting)
    weight, bias = task.params
    opt = OCNOpt([{"params": [weight]}, {"params": [bias], "lr": 0.0, "weight_decay": 0.5}], 0.01)
    assert [g["lr"] for g in opt.param_groups] == [0.01, 0.0]
    attach = {} if setting == "bare" else {"model": task.model}
    groups = [{"params": [weight], "weight_decay": 0.5}, {"params": [bias], "lr": 0.0}]
    task.opt = OCNOpt(groups, 0.01, **attach, **SETTINGS[setting])
    before = task.values()
    losses = task.run(5)
    assert losses[-1] < losses[0]
    assert differ([weight], before[:1])
    assert_identical(bias.detach(), before[1])


@some_cases
def test_without_gradients_nothing_moves(case: str) -> None:
    task = Task(*CASES[case])
    before = task.values()
    task.opt.step()
    assert_identical(task.values(), before)
    assert not any(task.opt.state.values())
    assert task.opt.step(lambda: 3.0) == 3.0


@settings
def test_gradients_of_zero_move_nothing(setting: str) -> None:
    task = Task(setting, momentum=0.0)
    task.x.zero_()
    task.model.bias.data.zero_()
    before = task.values()
    task.run(3)
    assert all(p.grad is not None and not p.grad.any() for p in task.params)
    assert_identical(task.values(), before)


@some_cases
def test_it_can_be_printed(case: str) -> None:
    assert "lr: " in repr(Task(*CASES[case]).opt)


@some_cases
def test_state_is_there_after_a_step(case: str) -> None:
    task = Task(*CASES[case])
    task.run(1)
    assert all(
        state and all(isinstance(v, (Tensor, int, float)) for v in state.values()) for state in state_of(task.opt)
    )


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Two state dicts, bit for bit."""
    assert ours.keys() == theirs.keys()
    assert ours["param_groups"] == theirs["param_groups"]
    assert_identical(ours["state"], theirs["state"])


@some_cases
def test_a_state_dict_makes_a_twin(case: str) -> None:
    """The twin takes the same steps; what was loaded stays as it was; saved again it is the same."""
    task, twin = Task(*CASES[case]), Task(*CASES[case])
    task.run(3)
    twin.model.load_state_dict(task.model.state_dict())
    saved = copy.deepcopy(task.opt.state_dict())
    kept = copy.deepcopy(saved)
    twin.opt.load_state_dict(saved)
    same(twin.opt.state_dict(), kept)
    assert task.run(3) == twin.run(3)
    assert_identical(task.values(), twin.values())
    same(saved, kept)
    same(task.opt.state_dict(), twin.opt.state_dict())


@some_cases
def test_saved_with_weights_only_and_pickled(case: str) -> None:
    task = Task(*CASES[case])
    task.run(2)
    file = io.BytesIO()
    torch.save(task.opt.state_dict(), file)
    file.seek(0)
    same(torch.load(file, weights_only=True), task.opt.state_dict())
    for again in (pickle.loads(pickle.dumps(task.opt)), copy.deepcopy(task.opt)):
        same(again.state_dict(), task.opt.state_dict())
        public = lambda opt: {name for name in vars(opt) if not name.startswith("_")}  # noqa: E731
        assert public(again) == public(task.opt)


@settings
def test_a_clock_that_was_saved_as_a_number(setting: str) -> None:
    task, twin = Task(setting), Task(setting)
    task.run(2)
    saved = copy.deepcopy(task.opt.state_dict())
    for state in saved["state"].values():
        state["step"] = state["step"].item()
    twin.model.load_state_dict(task.model.state_dict())
    twin.opt.load_state_dict(saved)
    assert task.run(2) == twin.run(2)
    assert_identical(state_of(task.opt), state_of(twin.opt))


@settings
@pytest.mark.parametrize(("saved_named", "loaded_named"), list(product([True, False], repeat=2)))
def test_named_parameters_load_into_unnamed_and_back(setting: str, saved_named: bool, loaded_named: bool) -> None:
    torch.manual_seed(0)

    def make(named: bool) -> Task:
        task = Task(setting)
        attach = {} if setting == "bare" else {"model": task.model}
        params = task.model.named_parameters() if named else task.model.parameters()
        task.opt.detach()
        task.opt = OCNOpt(params, **attach, **SETTINGS[setting])
        return task

    task, twin = make(saved_named), make(loaded_named)
    task.run(2)
    twin.model.load_state_dict(task.model.state_dict())
    twin.opt.load_state_dict(task.opt.state_dict())
    assert twin.opt.param_groups[0].get("param_names", []) == (
        ["weight", "bias"] if saved_named or loaded_named else []
    )
    assert task.run(2) == twin.run(2)


@settings
def test_runs_are_deterministic(setting: str) -> None:
    runs = []
    for _ in range(2):
        task = Task(setting)
        task.run(5)
        runs.append((task.values(), state_of(task.opt)))
    assert_identical(*runs)


@settings
def test_parameters_of_several_precisions(setting: str) -> None:
    torch.manual_seed(0)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 4, dtype=torch.float64), nn.Linear(4, 4)
            self.c = nn.Linear(4, 3, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.tanh(self.b(torch.tanh(self.a(x)).float())).bfloat16())

    model = Mixed()
    attach = {} if setting == "bare" else {"model": model}
    opt = OCNOpt(model.parameters(), **attach, **SETTINGS[setting])
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(6, 5, dtype=torch.float64)
    for _ in range(3):
        opt.zero_grad()
        model(x).float().square().mean().backward()
        opt.step()
    for p, q in zip(model.parameters(), before, strict=True):
        assert p.dtype == q.dtype
        assert not torch.equal(p, q)
        wanted = torch.float64 if p.dtype == torch.float64 else torch.float32
        assert opt.state[p]["momentum"].dtype == wanted


@settings
def test_another_default_dtype_changes_nothing(setting: str) -> None:
    runs = []
    for dtype in (torch.float32, torch.float64):
        task = Task(setting)
        torch.set_default_dtype(dtype)
        try:
            task.run(3)
        finally:
            torch.set_default_dtype(torch.float32)
        runs.append((task.values(), state_of(task.opt)))
    assert_identical(*runs)


# --- hooks of the optimizer ---


@pytest.fixture
def for_all_optimizers() -> Iterator[list[str]]:
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before all")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after all")),
    ]
    yield seen
    for handle in handles:
        handle.remove()


@settings
def test_hooks_of_steps(setting: str, for_all_optimizers: list[str]) -> None:
    task, seen = Task(setting), for_all_optimizers
    handles = [
        task.opt.register_step_pre_hook(lambda *_: seen.append("before")),
        task.opt.register_step_post_hook(lambda *_: seen.append("after")),
    ]
    task.run(1)
    assert seen == ["before all", "before", "after", "after all"]
    for handle in handles:
        handle.remove()
    task.run(1)
    assert seen[4:] == ["before all", "after all"]


@settings
def test_a_hook_before_the_step_may_give_it_another_closure(setting: str) -> None:
    task, other = Task(setting), []

    def replace(opt: OCNOpt, args: Any, kwargs: Any) -> Any:
        return (args[0], lambda: other.append(1) or task.closure()), kwargs

    task.opt.register_step_pre_hook(replace)
    task.opt.step(task.closure)
    assert other == [1]


@settings
def test_hooks_of_saving(setting: str) -> None:
    task, order = Task(setting), []
    task.run(1)
    opt = task.opt
    opt.register_state_dict_pre_hook(lambda o: order.append("second"))
    opt.register_state_dict_pre_hook(lambda o: order.append("first"), prepend=True)

    def post(o: OCNOpt, saved: dict[str, Any]) -> dict[str, Any]:
        order.append("post")
        assert saved["version"]
        assert all(isinstance(g["curvature"], str) for g in saved["param_groups"])
        return {**saved, "mine": 1}

    opt.register_state_dict_post_hook(post)
    opt.register_state_dict_post_hook(lambda o, saved: order.append("before post"), prepend=True)
    assert opt.state_dict()["mine"] == 1
    assert order == ["first", "second", "before post", "post"]


@settings
def test_hooks_of_loading_have_the_last_word(setting: str) -> None:
    """A hook before may hand over other state, one after may change what was loaded."""
    task, twin, order = Task(setting), Task(setting), []
    task.run(2)
    saved = task.opt.state_dict()

    def double(o: OCNOpt, given: dict[str, Any]) -> dict[str, Any]:
        order.append("double")
        state = {i: {**s, "momentum": 2 * s["momentum"]} for i, s in given["state"].items()}
        return {**given, "state": state, "param_groups": [{**g, "lr": 0.5} for g in given["param_groups"]]}

    def after(o: OCNOpt) -> None:
        order.append("after")
        assert [s["step"].item() for s in state_of(o)] == [2.0, 2.0]
        for p in o.state:
            o.state[p]["step"] = torch.tensor(7.0)

    opt = twin.opt
    opt.register_load_state_dict_pre_hook(double)
    opt.register_load_state_dict_pre_hook(lambda o, given: order.append("first"), prepend=True)
    opt.register_load_state_dict_post_hook(after)
    opt.load_state_dict(saved)
    assert order == ["first", "double", "after"]
    assert opt.param_groups[0]["lr"] == 0.5
    for ours, theirs in zip(state_of(opt), state_of(task.opt), strict=True):
        assert_identical(ours["momentum"], 2 * theirs["momentum"])
        assert ours["step"] == 7.0
    twin.run(1)


@settings
def test_a_refused_load_touches_nothing(setting: str) -> None:
    task = Task(setting)
    task.run(2)
    saved = copy.deepcopy(task.opt.state_dict())
    before, groups = state_of(task.opt), copy.deepcopy(task.opt.state_dict()["param_groups"])
    saved["param_groups"][0]["curvature"] = "of their own"
    with pytest.raises(ValueError, match="the checkpoint has curvature 'of their own'"):
        task.opt.load_state_dict(saved)
    assert_identical(state_of(task.opt), before)
    assert task.opt.state_dict()["param_groups"] == groups
    task.run(1)

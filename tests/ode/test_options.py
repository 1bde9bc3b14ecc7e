"""What torchdiffeq does not take is refused in one sentence that names the block and the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ode.fields import FIXED, METHODS, Net, batch
from torch import Tensor, nn

from ocnopt.ode import NeuralODE, SolverError
from ocnopt.ode.options import options_of


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"options": 3}, TypeError, "options must be a dict or None, got int"),
        (
            {"options": {"step_size": 0.1}},
            ValueError,
            "options: solver='dopri5' has no option 'step_size', only .*min_",
        ),
        (
            {"solver": "rk4", "options": {"stepsize": 0.1}},
            ValueError,
            "options: solver='rk4' has no option 'stepsize', only grid_constructor, interp, norm, perturb, step_size$",
        ),
        ({"adjoint_options": {"step": 1}}, ValueError, "adjoint_options: solver='dopri5' has no option 'step'"),
        ({"adjoint_options": {"norm": "semi"}}, ValueError, "norm must be a function of the state or 'seminorm'"),
        (
            {"options": {"norm": "seminorm"}},
            ValueError,
            "options: norm must be a function of the state, got 'seminorm'",
        ),
        ({"adjoint_solver": "euler", "adjoint_options": {"max_step": 1}}, ValueError, "solver='euler' has no option"),
    ],
)
def test_options_that_a_solver_does_not_know(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NeuralODE(Net(), **arguments)


@pytest.mark.parametrize("method", METHODS)
def test_every_option_that_is_let_through_is_known_to_torchdiffeq(method: str) -> None:
    assert ("step_size" in options_of(method)) == (method in FIXED)
    assert ("max_num_steps" in options_of(method)) == (method not in (*FIXED, "scipy_solver"))
    assert not {"func", "y0", "rtol", "atol", "self"} & set(options_of(method))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"options": {"first_step": "a"}}, "solver='dopri5' with options={'first_step': 'a'}: .*invalid data type"),
        (
            {"solver": "implicit_adams", "options": {"step_size": 0.5, "max_order": 100}},
            "solver='implicit_adams' with options={'step_size': 0.5, 'max_order': 100}: max_order must be at most",
        ),
        ({"solver": "rk4", "options": {"grid_constructor": lambda f, y, t: t[:1]}}, "AssertionError in integrate"),
        ({"solver": "scipy_solver", "options": {"solver": "x"}}, "options={'solver': 'x'}: .*must be one of"),
        ({"adjoint_options": {"first_step": "a"}}, "solver='dopri5' with options={'first_step': 'a'}: "),
    ],
)
def test_values_that_torchdiffeq_does_not_take(arguments: dict[str, Any], message: str) -> None:
    block = NeuralODE(Net(), **arguments)
    with pytest.raises(ValueError, match=rf"^NeuralODE\(Net\): torchdiffeq does not take .*{message}"):
        block(batch()).sum().backward()


def test_an_error_of_the_field_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        NeuralODE(Net())(batch().float())

    class Wrong(Net):
        def forward(self, t: Tensor, x: Tensor) -> Tensor:
            raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        NeuralODE(Wrong())(batch())


def test_where_no_step_can_be_chosen_the_time_is_that_of_the_beginning() -> None:
    block = NeuralODE(Net(), t=(0.25, 1.0))
    with pytest.raises(SolverError, match=r"the forward solve failed at t = 0\.25 \(the field is not finite\)"):
        block(torch.full((2, 3), float("nan"), dtype=torch.float64))


def test_options_go_to_torchdiffeq_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def solve(F: Any, x: Tensor, t: Tensor, **arguments: Any) -> Tensor:
        given.append(arguments)
        return x.expand(len(t), *x.shape)

    monkeypatch.setattr("ocnopt.ode.solver.odeint", solve)
    monkeypatch.setattr("ocnopt.ode.solver.odeint_adjoint", solve)
    norm = torch.linalg.vector_norm
    options, adjoint = {"first_step": 0.1, "norm": norm}, {"norm": "seminorm", "max_num_steps": 7}
    NeuralODE(Net(), gradient="discretize", options=options)(batch())
    tolerances = {"adjoint_rtol": 1e-3, "adjoint_atol": 1e-4}
    NeuralODE(Net(), options=options, adjoint_options=adjoint, **tolerances)(batch())
    assert [each["options"] for each in given] == [options, options]
    assert given[1]["adjoint_options"] == adjoint
    assert {k: given[1][k] for k in tolerances} == tolerances


# --- solvers with a fixed grid, and nothing that says which ---


class Fast(nn.Module):
    """dx/dt = −3x."""

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return -3 * x


@pytest.mark.parametrize("method", FIXED)
def test_one_step_over_the_whole_interval_is_said_once(method: str) -> None:
    block, x = NeuralODE(Fast(), t=(0.0, 2.0), solver=method), batch()
    message = rf"^NeuralODE\(Fast\): solver='{method}' takes a single step from t = 0 to 2: give options={{'step_size'"
    with pytest.warns(UserWarning, match=message) as said:
        block(x)
    assert said[0].filename == __file__
    block(x)  # warnings are errors here
    block(x, t=(0.0, 1.0))


@pytest.mark.parametrize(
    "arguments",
    [
        {"solver": "dopri5"},
        {"solver": "rk4", "options": {"step_size": 0.1}},
        {"solver": "rk4", "options": {"grid_constructor": lambda f, y, t: torch.linspace(t[0], t[1], 5).to(t)}},
        {"solver": "rk4", "t": (0.0, 0.5, 1.0)},
        {"solver": "rk4", "options": {"step_size": 0.1}, "adjoint_options": {"step_size": 0.1, "norm": "seminorm"}},
        {"adjoint_solver": "dopri8"},
    ],
)
def test_who_says_where_the_steps_are_hears_nothing(arguments: dict[str, Any]) -> None:
    NeuralODE(Net(), **arguments)(batch())


def test_a_call_with_two_times_of_a_block_that_has_more() -> None:
    block = NeuralODE(Net(), t=(0.0, 0.5, 1.0), solver="euler")
    with pytest.warns(UserWarning, match="a single step from t = 0 to 1"):
        block(batch(), t=(0.0, 1.0))


@pytest.mark.parametrize(
    ("arguments", "solver"),
    [
        ({"adjoint_solver": "rk4"}, "rk4"),
        # which replace the options altogether
        ({"solver": "euler", "options": {"step_size": 0.1}, "adjoint_options": {"norm": "seminorm"}}, "euler"),
    ],
)
def test_one_step_of_the_adjoint_solve_is_said_where_there_is_one(arguments: dict[str, Any], solver: str) -> None:
    block = NeuralODE(Net(), **arguments)
    with torch.no_grad():
        block(batch())
    with pytest.warns(UserWarning, match=rf"adjoint_solver='{solver}' takes a single .* give adjoint_options={{'step_"):
        block(batch())


def test_times_that_are_the_same_in_the_dtype_of_the_state() -> None:
    block = NeuralODE(Fast(), t=(1e6, 1e6 + 0.01))
    message = r"^NeuralODE\(Fast\): t: 1000000\.0 and 1000000\.01 are the same time in torch.float32, the dtype of the "
    with pytest.raises(ValueError, match=message):
        block(batch().float())
    assert block(batch()).isfinite().all()

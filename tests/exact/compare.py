"""One step of the engine, and its comparison with the dense solver on every quantity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.exact.dense import Dense, Expected
from tests.exact.nets import Batch, Net, loss
from torch import Tensor, nn

from ocnopt import OCNOpt
from ocnopt.bellman import Consistent

TOLERANCE = 1e-9
PLAIN = {"momentum": 0.0, "clamp": False, "gauss_newton": 0.7}  # what the tests want unless they say otherwise


def optimizer(net: Net, params: Any = None, **options: Any) -> OCNOpt:
    return OCNOpt(net.model.parameters() if params is None else params, **({"model": net.model} | PLAIN | options))


def engine_step(
    model: nn.Module, opt: OCNOpt, batch: Batch, between: Callable[[], object] = lambda: None
) -> dict[str, Tensor]:
    """δθ of each parameter. ``between`` runs between the backward pass and the step."""
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    X, targets = batch
    opt.zero_grad()
    loss(model(X), targets).backward()
    between()
    opt.step()
    return {n: p.detach() - before[n] for n, p in model.named_parameters()}


def assert_close(actual: Tensor, expected: Tensor, what: str, scale: float = 0.0) -> None:
    """Relative to the largest entry, or to ``scale`` where the answer itself may vanish."""
    assert actual.shape == expected.shape, what
    if expected.numel():
        error = float((actual - expected).abs().max()) / max(float(expected.abs().max()), scale)
        assert error <= TOLERANCE, f"{what}: relative error {error:.1e}"


def stagewise(net: Net, named: dict[str, Tensor]) -> list[Tensor]:
    """Tensors by parameter name as one vector for each stage."""
    of_piece = [[named[f"{k}.{n}"].flatten() for n, _ in p.named_parameters()] for k, p in enumerate(net.pieces)]
    return [torch.cat(vectors) for vectors in of_piece]


def assert_same_step(dense: Dense, actual: list[Tensor], e: Expected, scale: float = 0.0) -> None:
    for k, slots in enumerate(dense.slots):
        for slot in slots:
            what = f"δθ of {slot.name} of stage {k} at step {dense.t}"
            assert_close(actual[k][slot.place], e.dtheta[k][slot.place], what, scale)


def assert_same_values(opt: OCNOpt, e: Expected) -> None:
    """V_x, V_xx and Σ of every stage."""
    policy, s = opt.diagnostics.policy, e.solution
    assert policy is not None
    assert policy.projections.tolist() == [s.projections[k] for k in opt.diagnostics.stage_of]
    projected = sum(s.projections) > 0  # then V_xx may be zero
    for k, D in enumerate(e.D):
        a, Sigma = policy.value(k)
        scale = float(D.abs().max()) if projected and D.numel() else 0.0
        assert_close(D @ a, s.Vx[k], f"V_x of stage {k}", scale)
        assert_close(D @ Sigma @ D.T, s.Vxx[k], f"V_xx of stage {k}", scale**2)
        if D.numel():  # a state of integers has no value
            back = torch.linalg.pinv(D)
            expected = back @ s.Vxx[k] @ back.T
            assert_close(Sigma, expected, f"Σ of stage {k}", float(projected))
            if isinstance(policy, Consistent) and k < len(policy.J):
                assert_close(policy.J[k], torch.linalg.inv(expected), f"J of stage {k}")


def check(net: Net, opt: OCNOpt, steps: int = 3) -> list[Expected]:
    """Some steps of the engine beside those of the dense solver."""
    dense, seen = Dense(net, opt), []
    for batch in net.batches[:steps]:
        actual = engine_step(net.model, opt, batch)
        seen.append(dense.step(batch))
        assert_same_step(dense, stagewise(net, actual), seen[-1])
        assert_same_values(opt, seen[-1])
    return seen

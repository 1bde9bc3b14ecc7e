"""Eigendecompositions, and what is done in eigenbases, leave out what is nothing but zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from ocnopt import OCNOpt, linalg, whole_step
from ocnopt.baselines import EKFAC, ekfac
from ocnopt.curvature import eigen, layer
from ocnopt.curvature.inputs import squares_over


def _with_zeros(n: int, empty: list[int]) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(2, n // 2, n, dtype=torch.float64, generator=generator)
    x[..., empty] = 0
    return x.mT @ x


@pytest.mark.parametrize("empty", [[], [0], [3, 4, 70], list(range(10, 75)), list(range(80))])
def test_rows_of_zeros_are_left_out(empty: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: sizes.append(m.shape[-1]) or eigh(m))
    matrices = _with_zeros(80, empty)
    found = linalg.safe_eigh(matrices)
    assert found is not None
    values, vectors = found
    assert sizes == [80 - len(empty)]
    torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mT, matrices)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(80, dtype=torch.float64).expand(2, -1, -1))
    torch.testing.assert_close(values, eigh(matrices)[0].clamp_min(0))


def test_a_row_that_is_zero_in_one_matrix_only_stays() -> None:
    matrices = _with_zeros(80, [])
    matrices[0, 5] = 0
    matrices[0, :, 5] = 0
    found = linalg.safe_eigh(matrices)
    assert found is not None
    values, vectors = found
    torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mT, matrices)


def test_those_of_one_size_with_other_zeros_are_decomposed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: sizes.append(m.shape) or eigh(m))
    matrices = [_with_zeros(80, empty)[:1] for empty in ([], list(range(60)), list(range(60)))]
    found = eigen.batched(matrices)
    assert sizes == [(1, 80, 80), (2, 20, 20)]
    for matrix, pair in zip(matrices, found, strict=True):
        assert pair is not None
        torch.testing.assert_close(pair[1] @ torch.diag_embed(pair[0]) @ pair[1].mT, matrix)


def _layer(empty: int, outputs: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A, S, U_A, U_C and the inputs that are seen, of 80."""
    order = torch.randperm(80, generator=torch.Generator().manual_seed(1))
    A = _with_zeros(80, order[:empty].tolist())[:1]
    (_, U_A), (_, U_C) = linalg.safe_eigh(A) or (), linalg.safe_eigh(_with_zeros(outputs, [])[:1]) or ()
    S = torch.rand(1, outputs, 80, dtype=torch.float64)
    S[..., :empty] = 0
    return A, S, U_A, U_C, order[empty:].sort().values


@pytest.mark.parametrize("damping", [0.3, 0.0])
@pytest.mark.parametrize("empty", [40, 64, 80])
def test_what_is_solved_without_inputs_never_seen(empty: int, damping: float) -> None:
    A, S, U_A, U_C, expected = _layer(empty)
    seen = eigen.inputs_seen(A, S, U_A)
    assert seen is not None
    assert torch.equal(seen, expected)
    V = torch.randn(1, 6, 80, dtype=torch.float64)
    U = torch.kron(U_C[0].contiguous(), U_A[0].contiguous())
    C = U @ torch.diag(S.flatten() + damping) @ U.mT
    dense = (torch.linalg.pinv(C, rtol=1e-12) if not damping else torch.linalg.inv(C)) @ V.flatten()
    torch.testing.assert_close(eigen.Inverse(S, U_A, U_C, damping, seen)(V), dense.reshape(1, 6, 80))
    torch.testing.assert_close(eigen.Inverse(S, U_A, U_C, damping)(V), dense.reshape(1, 6, 80))


@pytest.mark.parametrize("empty", [0, 60, 80])
def test_squares_without_inputs_never_seen(empty: int) -> None:
    A, S, U_A, U_C, seen = _layer(empty)
    asked = []

    class Rows:
        def squares(self, U_A: Tensor, U_C: Tensor) -> Tensor:
            asked.append(U_A.shape[-1])
            G = torch.zeros(5, 6, 80, dtype=torch.float64)
            G[..., seen] = torch.randn(5, 6, len(seen), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
            return (U_C.mT @ G @ U_A).square().sum(0, keepdim=True)

    passes: Any = [Rows(), Rows()]
    found = squares_over(passes, S, U_A, U_C, eigen.inputs_seen(A, S, U_A))
    assert asked == ([80 - empty] * 2 if empty < 80 else [])  # of nothing nothing is formed
    torch.testing.assert_close(found, squares_over(passes, S, U_A, U_C))
    assert found.count_nonzero() == 6 * (80 - empty)


def test_when_all_inputs_are_treated_alike() -> None:
    """Few were never seen, the basis knows nothing of it, there is some curvature, or one may not look."""
    A, S, U_A, *_ = _layer(60)
    assert eigen.inputs_seen(A, S, U_A) is not None
    with whole_step.captured():
        assert eigen.inputs_seen(A, S, U_A) is None
    assert eigen.inputs_seen(A.expand(2, -1, -1), S.expand(2, -1, -1), U_A.expand(2, -1, -1)) is None
    known = S.clone()
    known[0, 2, 5] = 1e-9
    assert eigen.inputs_seen(A, known, U_A) is None
    turn = torch.linalg.qr(torch.randn(80, 80, dtype=torch.float64))[0]
    assert eigen.inputs_seen(A, S, U_A @ turn) is None
    few = _layer(39)
    assert eigen.inputs_seen(*few[:3]) is None


def _steps(kind: str) -> list[Tensor]:
    """Of a network whose last kernels see one tap of nine. Its factors are of full rank: nothing is left to chance."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 9, 3, padding=1), nn.Tanh(), nn.Conv2d(9, 8, 3, padding=1), nn.Flatten(), nn.Linear(8, 12)]
    model = nn.Sequential(*layers).double()
    opt: Optimizer
    if kind == "EKFAC":
        opt = EKFAC(model.parameters(), 0.05, model=model, momentum=0.5, weight_decay=0.1, refresh_every=4)
    else:
        options: dict[str, Any] = {"curvature": "kronecker", "feedback": kind, "weight_decay": 0.1, "refresh_every": 4}
        opt = OCNOpt(model.parameters(), 0.05, model=model, **options)
    for _ in range(9):
        opt.zero_grad()
        cross_entropy(model(torch.randn(40, 2, 1, 1).double()), torch.randint(12, (40,))).backward()
        opt.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["off", "linear", "nonlinear", "EKFAC"])
def test_steps_without_inputs_never_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, real = [], eigen.inputs_seen

    def looked(*args: Tensor) -> Tensor | None:
        answers.append(real(*args))
        return answers[-1]

    def replace(by: Any) -> None:
        for module in (layer, ekfac):
            monkeypatch.setattr(module, "inputs_seen", by)

    replace(looked)
    ours = _steps(kind)
    assert {len(each) for each in answers if each is not None} == {10}  # nine of 81, and the bias
    replace(lambda *_: None)
    torch.testing.assert_close(ours, _steps(kind))

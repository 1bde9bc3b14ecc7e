"""What the Kronecker curvature reads of a layer, against gradients of samples that are formed one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.layers.oracle import adapter_of, assert_same, call_of
from torch import Tensor, nn

from ocnopt.curvature.inputs import Inputs
from ocnopt.layers import outer
from ocnopt.linalg import as_allowed, full_precision

LAYERS = {
    "linear": (nn.Linear(5, 3), (5,)),
    "tokens": (nn.Linear(4, 3, bias=False), (2, 4)),
    "many tokens": (nn.Linear(2, 2), (9, 2)),
    "conv": (nn.Conv2d(2, 4, 3, stride=2, padding=1), (2, 4, 4)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2, padding=1), (4, 3, 3)),
    "pixels": (nn.Conv2d(4, 3, 1, bias=False), (4, 3, 3)),
    "one position": (nn.Conv2d(2, 3, 2), (2, 2, 2)),
    "transposed": (nn.ConvTranspose2d(2, 3, 2, stride=2), (2, 3, 3)),
}


def bases(g: int, c: int, a: int) -> tuple[Tensor, Tensor]:
    U_A, U_C = (torch.linalg.qr(torch.randn(g, n, n, dtype=torch.float64))[0] for n in (a, c))
    return U_A, U_C


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("piece", [1, 300, 1 << 20])
def test_sums_and_squares(name: str, keep: bool, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two calls of unequal duration, whatever is formed at a time and whatever stays."""
    monkeypatch.setattr(outer, "CACHED", piece)
    module, shape = LAYERS[name]
    torch.manual_seed(0)
    calls = [call_of(module.double(), torch.randn(4, *shape, dtype=torch.float64)) for _ in range(2)]
    calls = [replace(call, duration=d) for call, d in zip(calls, (0.3, 0.9), strict=True)]
    adapter = adapter_of(module)
    each = [(adapter.kronecker_inputs(call), call.duration) for call in calls]
    A, C = (sum(d * torch.einsum("bgti,bgtj->gij", v, v) for v, d in theirs) for theirs in zip(*(
        ((use.x, d), (use.h, d)) for use, d in each), strict=True))  # fmt: skip
    G = sum(d * torch.einsum("bgtc,bgta->bgca", use.h, use.x) for use, d in each)
    U_A, U_C = bases(*G.shape[1:])
    seen = Inputs(adapter, calls, keep)
    for found, expected in zip(seen.sums(U_A, U_C), (A, C), strict=True):
        assert_same(found, expected)
    squares = torch.einsum("gxc,bgxy,gyd->bgcd", U_C, G, U_A).square().sum(0)
    assert_same(seen.squares(U_A, U_C), squares)
    assert_same(seen.squares(U_A, U_C), squares)  # nothing was overwritten
    for first in (1, U_A.shape[-1] // 2):
        assert_same(seen.squares(U_A[..., first:], U_C), squares[..., first:])


@pytest.mark.parametrize("keep", [False, True])
def test_windows_are_formed_once(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If they are what the sums are formed of, and not large."""
    call = call_of(nn.Conv2d(8, 6, 1).double(), torch.randn(3, 8, 2, 2, dtype=torch.float64))
    adapter, formed = adapter_of(call.module), []
    whole = type(adapter).factors
    monkeypatch.setattr(type(adapter), "factors", lambda self, c: formed.append(c) or whole(self, c))

    def read(piece: int) -> int:
        monkeypatch.setattr(outer, "CACHED", piece)
        formed.clear()
        seen, (U_A, U_C) = Inputs(adapter, [call], keep), bases(1, 6, 9)
        seen.sums(U_A, U_C)
        seen.squares(U_A, U_C)
        return len(formed)

    # 12 rows of 9 and 6 numbers. Otherwise sums are those of pixels, and squares form windows sample by sample
    assert read(12 * 15) == (1 if keep else 3)
    assert read(12 * 15 - 1) == 3


def test_precision_is_that_which_the_user_allows() -> None:
    cuda, said = torch.device("cuda"), torch.get_float32_matmul_precision
    before = said()
    try:
        for allowed in ("high", "highest"):
            torch.set_float32_matmul_precision(allowed)
            with as_allowed(cuda):
                assert said() == allowed
            with full_precision(), full_precision():
                with as_allowed(cuda):
                    assert said() == allowed
                    with full_precision():
                        assert said() == "highest"
                    assert said() == allowed
                assert said() == "highest"
                with as_allowed(torch.device("cpu")):
                    assert said() == "highest"
            assert said() == allowed
    finally:
        torch.set_float32_matmul_precision(before)

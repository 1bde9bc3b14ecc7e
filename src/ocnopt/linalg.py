"""Small dense linear algebra that never ends a training run.

An eigendecomposition or Cholesky factorisation may fail on a matrix that is singular, badly scaled or not finite. Each
function here climbs a ladder (symmetrise, add a jitter relative to the matrix' own scale, retry in float64, retry on
the CPU) and reports whether it arrived, so that the caller can keep its last good factor and count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def symmetrise(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


class _Without:
    """Autocast is off, in a block or in a function. Where it is off already that costs next to nothing."""

    __slots__ = ("_stack",)

    def __init__(self) -> None:
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        if not torch._C._is_any_autocast_enabled():
            return
        self._stack = ExitStack()
        for device in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(device):
                self._stack.enter_context(torch.autocast(device, enabled=False))

    def __exit__(self, *raised: Any) -> None:
        if self._stack is not None:
            self._stack.__exit__(*raised)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def found(*args: P.args, **kwargs: P.kwargs) -> T:
            if not torch._C._is_any_autocast_enabled():
                return function(*args, **kwargs)
            with _Without():
                return function(*args, **kwargs)

        return found


def without_autocast() -> _Without:
    """The user's loop or the model may be under autocast; the optimizer's own sums and products are not."""
    return _Without()


#: what the user allows, as it was found where full precision was asked for, outermost first
_allowed: list[str] = []


@contextmanager
def full_precision() -> Iterator[None]:
    """Factors and kernels are sums that later get inverted: TF32 and friends are off while they are formed."""
    _allowed.append(torch.get_float32_matmul_precision())
    torch.set_float32_matmul_precision("highest")
    try:
        with without_autocast():
            yield
    finally:
        torch.set_float32_matmul_precision(_allowed.pop())


@contextmanager
def as_allowed(device: torch.device) -> Iterator[None]:
    """Inside full precision, what needs less of it and is large: turning gradients into an eigenbasis and back. On CUDA
    it follows the user, ``torch.set_float32_matmul_precision``; elsewhere nothing changes.
    """
    inside = device.type == "cuda" and bool(_allowed)
    if inside:
        torch.set_float32_matmul_precision(_allowed[0])
    try:
        yield
    finally:
        if inside:
            torch.set_float32_matmul_precision("highest")


#: smaller matrices are decomposed sooner than looked at
_SMALL = 64


def safe_eigh(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues and eigenvectors of symmetric positive semi-definite matrices ``[..., n, n]``, or ``None``.

    Eigenvalues come back clamped at zero. ``None`` means that the matrix is not finite or that every rung failed.

    Inputs that were never anything but zero (borders of images, taps of a convolution that see nothing but padding)
    have zeros in their rows and columns: what is left is decomposed without them.
    """
    matrix = symmetrise(matrix)
    if not bool(torch.isfinite(matrix).all()):
        return None
    n = matrix.shape[-1]
    seen = matrix.diagonal(dim1=-2, dim2=-1).reshape(-1, n).any(0) if n >= _SMALL else None
    if seen is None or bool(seen.all()):
        return _climb(matrix)
    inside, outside = seen.nonzero()[:, 0], (~seen).nonzero()[:, 0]
    found = _climb(matrix[..., inside[:, None], inside])
    return None if found is None else _with_zeros(*found, inside, outside)


def _with_zeros(values: Tensor, vectors: Tensor, inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """With the rows and columns that are zero. Their eigenvalues are the smallest, and come first."""
    zeros, n = len(outside), len(inside) + len(outside)
    every = vectors.new_zeros(*vectors.shape[:-2], n, n)
    every[..., outside, torch.arange(zeros, device=outside.device)] = 1
    every[..., inside, zeros:] = vectors
    return torch.nn.functional.pad(values, (zeros, 0)), every


def _climb(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    scale = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    jittered = matrix + scale * eye * 16 * torch.finfo(matrix.dtype).eps
    rungs = (matrix, jittered, jittered.double(), jittered.double().cpu())
    for rung in rungs:
        try:
            values, vectors = torch.linalg.eigh(rung)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # missing in torch's stubs
            continue
        if bool(torch.isfinite(values).all()) and bool(torch.isfinite(vectors).all()):
            return values.clamp_min(0).to(matrix), vectors.to(matrix)
    return None


def solve_spd(matrix: Tensor, rhs: Tensor) -> Tensor:
    """Solve J w = v for symmetric positive definite J ``[..., r, r]`` and v ``[..., r]``, without synchronisation.

    One Cholesky factorisation for the whole batch. Where it breaks down (a kernel that overflowed, say) the answer is
    NaN, for the caller to mask.
    """
    if matrix.shape[-1] == 1:
        return rhs / matrix[..., 0]
    factor, info = torch.linalg.cholesky_ex(matrix)
    answer = torch.cholesky_solve(rhs[..., None], factor)[..., 0]
    return torch.where((info == 0)[..., None], answer, torch.nan)

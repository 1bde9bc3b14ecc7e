"""The Bellman recursion, collapsed to r×r kernels. Pure mathematics: no modules, no hooks, no devices.

Notation (S stages, r groups of samples, all in autograd's scale; a stage has one or several seats, see
:class:`~ocnopt.stages.Stages`):

=========  ============  ==============================================================================
``K``      ``[S, r, r]``  stage kernel Σ_players G^T M^{-1} G
``u``      ``[S, r]``     G^T M^{-1} ℓ, what the linear cost (weight decay, momentum) does to each group's loss
``s``      ``[r]``        D_k^T δX_k, the change of each group's loss caused by everything upstream
``w``      ``[r]``        the policy's answer: the weight of each group's gradient; 1 is plain descent
``a``      ``[r]``        V_k^x  = D_k a_k
``Sigma``  ``[r, r]``     V_k^xx = D_k Σ_k D_k^T
=========  ============  ==============================================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from ocnopt.linalg import full_precision, safe_eigh, solve_spd


def terminal_precision(fractions: Tensor, gauss_newton: float) -> Tensor:
    """Diagonal of Σ_K^{-1}: n_g / (β² B), from the fractions n_g / B."""
    return fractions if gauss_newton == 1 else fractions / gauss_newton**2


def on_line(start: Tensor, slope: Tensor, s: Tensor) -> Tensor:
    """start + slope · s."""
    if len(s) == 1:
        return torch.addcmul(start, slope[0], s)
    with full_precision():
        return torch.addmv(start, slope, s)


class Policy(ABC):
    """The feedback policy of all stages; :meth:`weights` is the paper's eq. (opt-u) in coordinates of the groups."""

    @property
    @abstractmethod
    def projections(self) -> Tensor:
        """``[N]``: how many eigenvalues were cut at the stage of each seat to keep V^xx positive semi-definite."""

    @abstractmethod
    def weights(self, seat: int, s: Tensor) -> Tensor:
        """w of a seat for the differential state ``s`` of its stage."""

    @abstractmethod
    def value(self, k: int) -> tuple[Tensor, Tensor]:
        """``(a_k, Σ_k)``: V_k^x = D_k a_k and V_k^xx = D_k Σ_k D_k^T, for 0 ≤ k ≤ S."""


class StageKernels(Protocol):
    """K and u of all seats, ``[N, r, r]`` and ``[N, r]``, their sums from each stage on, J + Σ K and b − Σ u; J^{-1} b
    and J^{-1} of all stages, where there is a quicker way to them.
    """

    @property
    def K(self) -> Tensor: ...
    @property
    def u(self) -> Tensor: ...
    @property
    def tails(self) -> tuple[Tensor, Tensor]: ...
    def add_to(self, J: Tensor, b: Tensor) -> tuple[Tensor, Tensor]: ...
    def lines(self, precision: Tensor) -> tuple[Tensor, Tensor] | None: ...


class Consistent(Policy):
    """Q_θθ contains its own Gauss-Newton term, as DDP's eq. (Q2nd) says. Positive definite by construction.

    J_k = Σ_K^{-1} + Σ_{j≥k} K_j,   b_k = Σ_K^{-1} 1 − Σ_{j≥k} u_j,   w_k = J_k^{-1} (b_k + s_k).

    Seats that do not cooperate take the others of their stage for frozen: J_{k+1} + K_n and b_{k+1} − u_n. What is
    passed back to earlier stages is the value of the cooperative game either way.
    """

    def __init__(
        self, kernels: StageKernels, precision: Tensor, stage_of: Sequence[int], cooperative: bool = True
    ) -> None:
        self.kernels, self.precision = kernels, precision
        self.stage_of, self.cooperative = stage_of, cooperative

    @property
    def _last(self) -> Tensor:
        """Σ_K^{-1}."""
        return self.precision[:, None] if len(self.precision) == 1 else torch.diag(self.precision)

    @cached_property
    def J(self) -> Tensor:
        """``[S, r, r]``."""
        return self._last + self.kernels.tails[0]

    @cached_property
    def b(self) -> Tensor:
        return self.precision - self.kernels.tails[1]

    @cached_property
    def _of_seats(self) -> tuple[Tensor, Tensor]:
        """J and b as each seat sees them, or as each stage does where its seats cooperate."""
        if self.cooperative:
            return self.J, self.b
        J = torch.cat([self.J[1:], self._last[None]])
        b = torch.cat([self.b[1:], self.precision[None]])
        J, b = (torch.stack([rows[k] for k in self.stage_of]) for rows in (J, b))  # a list of indices would be copied
        return J + self.kernels.K, b - self.kernels.u

    @cached_property
    def _lines(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """J^{-1} b, ``[r]``, and J^{-1} of each; NaN where J is not positive definite, for the caller to mask.

        One batched factorisation for all of them, so that nothing is left to be solved while the network runs.
        """
        known = self.kernels.lines(self.precision) if self.cooperative else None
        if known is not None:
            return known[0].unbind(), known[1].unbind()
        J, b = self._of_seats
        if J.shape[-1] == 1:
            inverse = J.reciprocal()
            return (b / J[:, 0]).unbind(), inverse.unbind()
        factors, info = torch.linalg.cholesky_ex(J)
        eye = torch.eye(J.shape[-1], dtype=J.dtype, device=J.device).expand_as(J)
        half = torch.linalg.solve_triangular(factors, eye, upper=False)
        half = torch.where((info == 0)[:, None, None], half, torch.nan)
        with full_precision():
            inverse = half.mT @ half
            return (inverse @ b[:, :, None])[:, :, 0].unbind(), inverse.unbind()

    def line(self, seat: int) -> tuple[Tensor, Tensor]:
        """w of a seat is a line in s: where it starts, and its slope."""
        n, (starts, slopes) = self.stage_of[seat] if self.cooperative else seat, self._lines
        return starts[n], slopes[n]

    @property
    def projections(self) -> Tensor:
        return torch.zeros_like(self.kernels.K[:, 0, 0])

    def weights(self, seat: int, s: Tensor) -> Tensor:
        start, slope = self.line(seat)
        return on_line(start, slope, s)

    def whole_network(self) -> Tensor:
        """w of the linear rollout, one for all stages: J_0^{-1} b_0, the damped Gauss-Newton step of the network."""
        return solve_spd(*self.kernels.add_to(self._last, self.precision))

    def value(self, k: int) -> tuple[Tensor, Tensor]:
        if k == len(self.J):
            return torch.ones_like(self.precision), torch.diag(1 / self.precision)
        eye = torch.eye(len(self.precision), dtype=self.J.dtype, device=self.J.device)
        return solve_spd(self.J[k], self.b[k]), torch.linalg.solve(self.J[k], eye)


class Paper(Policy):
    """Prop. 3 and Cor. 4 literally: Q_θθ := C_k, the step size applied outside. Built backward, stage by stage.

    An approximate C can leave the cone of positive semi-definite V^xx. The factor L of Σ = L L^T is propagated, and
    eigenvalues Λ > 1 of L^T K L are projected *jointly* in a and Σ: projecting Σ alone lets a flip its sign.

    With Q_θθ := C the players of a stage do not see each other: cooperative and non-cooperative games are the same.
    """

    def __init__(self, precision: Tensor, stage_of: Sequence[int]) -> None:
        self.stage_of = stage_of
        self._a = [torch.ones_like(precision)]  # a_K, a_{K-1}, …
        self._L = [torch.diag(precision.rsqrt())]
        self._cut: list[Tensor] = []
        self._stages: int | None = None

    @property
    def a(self) -> Tensor:
        """a_{k+1} for the stage about to be added: the weights of the curvature's statistics."""
        return self._a[-1]

    def add_stage(self, K: Tensor, u: Tensor) -> None:
        """One step of the backward recursion, from k + 1 to k."""
        a, L = self._a[-1], self._L[-1]
        values, U = _eigh(L.mT @ K @ L)
        keep = 1 / values.clamp_min(1)  # min(1, Λ^{-1})
        LU = L @ U
        # from 1 down: what is left of a weight that was cut is rounding, and statistics must not be made of that
        self._a.append(_without_rounding(a - LU @ (keep * (LU.mT @ (K @ a + u)))))
        self._L.append(LU * (1 - values).clamp_min(0).sqrt())
        self._cut.append((values > 1).sum().to(a.dtype))

    def finish(self) -> None:
        """All stages are in: index them from the network's input."""
        self._stages = len(self._cut)
        self._a.reverse()
        self._L.reverse()

    @property
    def projections(self) -> Tensor:
        return torch.stack(self._cut[::-1])[list(self.stage_of)]

    def weights(self, seat: int, s: Tensor) -> Tensor:
        a, Sigma = self.value(self.stage_of[seat] + 1)
        return a + Sigma @ s

    def value(self, k: int) -> tuple[Tensor, Tensor]:
        assert self._stages is not None, "finish() comes before value()"
        return self._a[k], self._L[k] @ self._L[k].mT


def _without_rounding(a: Tensor) -> Tensor:
    return torch.where(a.abs() < 64 * torch.finfo(a.dtype).eps, 0, a)


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    if matrix.shape[-1] == 1:  # no LAPACK call, so no synchronisation, for the paper's rank 1
        return matrix[0].clamp_min(0), torch.ones_like(matrix)
    found = safe_eigh(matrix)
    if found is None:  # not finite: the step is going to be masked; identity keeps the shapes
        return torch.full_like(matrix[0], torch.nan), torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    return found

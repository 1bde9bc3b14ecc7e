"""What a step did, kept on the device until somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ocnopt.linalg import full_precision
from ocnopt.summary import table

if TYPE_CHECKING:
    from ocnopt.bellman import Policy
    from ocnopt.play import Answers
    from ocnopt.problem import Kernels


@dataclass(frozen=True)
class LayerReport:
    """One layer in the last step."""

    name: str
    stage: int  #: layers of the same stage act on the same state
    trace: float  #: trace of its kernel K: how far the layer alone would move the loss
    w_min: float  #: smallest and largest weight that the policy gave to a group of samples; 1 is plain descent
    w_max: float
    s: float  #: change of the loss that the layers before are predicted (nonlinear: measured) to have made
    clamped: int  #: weights that were moved back into [0, 1]
    projections: int  #: eigenvalues cut to keep the value function convex (paper mode)


@dataclass
class Diagnostics:
    """The last step, layer by layer. Reading a value waits for the device; a step that nobody asks about costs nothing.

    Empty (``layers == []``) before the first step and with the feedback off.
    """

    names: Sequence[str] = ()
    stage_of: Sequence[int] = ()  # the stage of each of these
    policy: Policy | None = field(default=None, repr=False)  # the value function of each stage: policy.value(k)
    kernels: Kernels | None = field(default=None, repr=False)
    answers: Answers | None = field(default=None, repr=False)
    measured: bool = False  # was s measured, by a nonlinear rollout?
    measured_change: Tensor | None = field(default=None, repr=False)
    skipped: Tensor | None = field(default=None, repr=False)
    sign: float = 1.0  # −1 where the loss is maximised: the game minimises its negative
    failed_refreshes: int = 0  #: eigendecompositions that failed in this step; the last good ones were kept
    actual: Callable[[], float] | None = field(default=None, repr=False)
    passing: bool = field(default=False, repr=False)  # are its numbers overwritten by the next step?

    @property
    def asked(self) -> Tensor | None:
        """w before clamping, ``[N, r]``."""
        return None if self.answers is None else self.answers.asked

    @property
    def w(self) -> Tensor | None:
        return None if self.answers is None else self.answers.w

    @property
    def measured_s(self) -> Tensor | None:
        return self.answers.s if self.measured and self.answers is not None else None

    @property
    def s(self) -> Tensor | None:
        """s as each layer saw it, ``[N, r]``."""
        if self.measured or self.kernels is None:
            return self.measured_s
        changes = self._change(self.kernels.plan)
        before = changes.cumsum(0) - changes
        first = [self.stage_of.index(k) for k in self.stage_of]  # the layers of a stage are next to each other
        return before[first]

    def _change(self, kernels: tuple[Tensor, Tensor]) -> Tensor:
        w = self.w
        assert w is not None
        with full_precision():
            return -(torch.einsum("kij,kj->ki", kernels[0], w) + kernels[1])

    @cached_property
    def layers(self) -> list[LayerReport]:
        asked, w, s = self.asked, self.w, self.s
        if asked is None or w is None or s is None or self.kernels is None or self.policy is None:
            return []
        traces = self.kernels.K.diagonal(dim1=1, dim2=2).sum(1)
        columns = (traces, w.amin(1), w.amax(1), self.sign * s.sum(1), (asked != w).sum(1), self.policy.projections)
        rows = torch.stack([c.to(torch.float64) for c in columns], 1).tolist()
        return [
            LayerReport(name, stage, trace, low, high, s, round(clamps), round(cuts))
            for name, stage, (trace, low, high, s, clamps, cuts) in zip(self.names, self.stage_of, rows, strict=True)
        ]

    @cached_property
    def predicted_change(self) -> float | None:
        """The change of the loss that the step is expected to have made; after a nonlinear rollout ⟨∂L/∂x_K, δx_K⟩."""
        if self.measured_change is not None:
            return float(self.measured_change)
        return None if self.kernels is None else self.sign * float(self._change(self.kernels.taken).sum())

    @cached_property
    def actual_change(self) -> float | None:
        """The change of the loss that the step made, when ``step`` was given a closure: it is called once more, now.

        Ask before the next step. Gradients, buffers and random numbers are left as they are.
        """
        return None if self.actual is None else self.actual()

    @cached_property
    def skipped_steps(self) -> int:
        """Steps so far that were skipped because a loss or gradient was not finite."""
        return 0 if self.skipped is None else int(self.skipped)

    def __str__(self) -> str:
        rows = [
            (
                x.name,
                f"{x.trace:.3g}",
                f"{x.w_min:.3f} … {x.w_max:.3f}",
                f"{x.s:+.3g}",
                str(x.clamped),
                str(x.projections),
            )
            for x in self.layers
        ]
        return table(("layer", "trace K", "w", "s", "clamped", "projected"), rows)

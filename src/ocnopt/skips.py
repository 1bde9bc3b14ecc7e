"""Steps that were skipped because something was not finite: counted on the device, told when somebody asks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from ocnopt import whole_step
from ocnopt.problem import Problem


@dataclass
class Bad:
    """The last skipped step of those that checked the same things."""

    finite: Tensor  # [checked]
    turn: Tensor  # how many had been skipped by then


class Skips:
    """``count`` never waits for the device; ``report`` does."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self._bad: dict[tuple[str, ...], Bad] = {}  # by what was checked
        self._reported = 0

    def count(self, problem: Problem) -> None:
        """Everything changes in place: a CUDA graph goes on counting where it began."""
        if self.total is None:
            self.total = torch.zeros_like(problem.ok)
        self.total += 1 - problem.ok
        key, fine = problem.checked, problem.fine
        if key not in self._bad:
            if len(self._bad) > 64:
                self._bad.clear()
            self._bad[key] = Bad(torch.ones_like(problem.finite), torch.zeros_like(self.total))
        last = self._bad[key]
        whole_step.keep(last, self.total)
        torch.where(fine, last.finite, problem.finite, out=last.finite)
        torch.where(fine, last.turn, self.total, out=last.turn)

    def report(self, alone: bool) -> None:
        """Warn if steps were skipped since the last report."""
        if self.total is None or int(self.total) <= self._reported:
            return
        new = int(self.total) - self._reported
        names, last = max(self._bad.items(), key=lambda item: float(item[1].turn))
        bad = [name for name, finite in zip(names, last.finite.tolist(), strict=True) if not finite]
        elsewhere = "the loss" if alone else "the loss, or something on another process,"
        where = f"the gradient of {bad[0]!r}" if bad else elsewhere
        warnings.warn(
            f"{new} step(s) skipped: {where} was not finite, or too large to be squared; "
            f"parameters and state are unharmed",
            stacklevel=3,
        )
        self._reported = int(self.total)

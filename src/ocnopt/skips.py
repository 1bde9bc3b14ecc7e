"""Steps that were skipped because something was not finite: counted on the device, told when somebody asks."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ocnopt.problem import Problem


class Skips:
    """``count`` never waits for the device; ``report`` does."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self._first_bad: Tensor | None = None  # index into _names
        self._names: list[str] = []  # every name that was ever checked; an index stays what it was
        self._codes: dict[tuple[str, ...], Tensor] = {}
        self._reported = 0

    def count(self, problem: Problem) -> None:
        bad = 1 - problem.ok
        if self.total is None or self._first_bad is None:
            self.total, self._first_bad = torch.zeros_like(bad), torch.full_like(bad, -1)
        place = problem.finite.to(bad.dtype).argmin()
        code = self._code(problem).index_select(0, place.reshape(1)).squeeze()  # an index in brackets would be read
        first = torch.where(problem.finite.all(), -1.0, code)
        # in place: a CUDA graph goes on counting where it began
        self._first_bad.copy_(torch.where(bad.bool(), first, self._first_bad))
        self.total += bad

    def _code(self, problem: Problem) -> Tensor:
        key = tuple(problem.checked)
        if key not in self._codes:
            known = {name: i for i, name in enumerate(self._names)}
            for name in key:
                known.setdefault(name, len(known))
            self._names = list(known)
            if len(self._codes) > 64:
                self._codes.clear()
            codes = [float(known[name]) for name in key]
            self._codes[key] = torch.tensor(codes, dtype=problem.ok.dtype, device=problem.ok.device)
        return self._codes[key]

    def report(self, alone: bool) -> None:
        """Warn if steps were skipped since the last report."""
        if self.total is None or self._first_bad is None or int(self.total) <= self._reported:
            return
        bad, new = int(self._first_bad), int(self.total) - self._reported
        elsewhere = "the loss" if alone else "the loss, or something on another process,"
        where = elsewhere if bad < 0 else f"the gradient of {self._names[bad]!r}"
        warnings.warn(
            f"{new} step(s) skipped: {where} was not finite, or too large to be squared; "
            f"parameters and state are unharmed",
            stacklevel=3,
        )
        self._reported = int(self.total)

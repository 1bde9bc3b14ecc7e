"""From values to pixels: linear and logarithmic axes with round ticks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ocnopt.lab.report.text import significant


@dataclass(frozen=True)
class Scale:
    """Maps ``low … high`` to ``start … stop``."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (self._transformed(v) for v in (self.low, self.high, value))
        return self.start + (self.stop - self.start) * (value - low) / (high - low)

    def clipped(self, value: float) -> float:
        return self(min(max(value, self.low), self.high))

    def ticks(self, count: int) -> list[float]:
        """About ``count`` round values within the axis."""
        if not self.log:
            return linear_ticks(self.low, self.high, count)
        return log_ticks(self.low, self.high, count)

    def _transformed(self, value: float) -> float:
        return math.log10(value) if self.log else value


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    rough = (high - low) / max(count, 1)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float, count: int) -> list[float]:
    """Powers of ten, every other one where there are many; 1, 2, 5 or 1, 3 in between where there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for mantissas in ((1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**e for e in range(first, last + 1) for m in mantissas]
        inside = [t for t in ticks if low * (1 - 1e-9) <= t <= high * (1 + 1e-9)]
        if len(inside) <= count + 1:
            break
    every = math.ceil(len(inside) / (count + 1))
    if len(inside) < 2:  # less than one octave
        return linear_ticks(low, high, count)
    return inside[::every]


def domain(values: Sequence[float], *, log: bool, margin: float = 0.04) -> tuple[float, float]:
    """The range of the values and a little more; never empty."""
    low, high = min(values), max(values)
    if log:
        low, high = math.log10(low), math.log10(high)
    pad = margin * (high - low) if high > low else 0.15 if log else abs(high) * 0.1 or 1.0
    low, high = low - pad, high + pad
    return (10.0**low, 10.0**high) if log else (low, high)


def tick_text(value: float) -> str:
    """Short enough for the margin: ``20k``, ``0.25``, ``1e−4``."""
    if value == 0:
        return "0"
    if abs(value) < 0.001:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}".replace("-", "−")
    if 1000 <= abs(value) < 1_000_000 and value == int(value):
        return f"{value / 1000:g}k".replace("-", "−")
    return significant(value, 4)

"""Numbers as a reader wants them."""

from __future__ import annotations

import math
import textwrap

MISSING = "–"


def significant(value: float, digits: int = 3) -> str:
    """``0.0123``, ``1.2e−05``, ``∞``; a dash where there is no number."""
    if math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.{digits}g}".replace("-", "−").replace("e+0", "e").replace("e+", "e").replace("e−0", "e−")


def percent(fraction: float, decimals: int = 2) -> str:
    return MISSING if not math.isfinite(fraction) else f"{100 * fraction:.{decimals}f} %"


def spread(mean: float, deviation: float, *, fraction: bool) -> str:
    """``97.31 ± 0.42 %``; without a deviation the mean alone."""
    if not fraction:
        return significant(mean) + (f" ± {significant(deviation, 2)}" if math.isfinite(deviation) else "")
    if not math.isfinite(deviation):
        return percent(mean)
    return f"{100 * mean:.2f} ± {100 * deviation:.2f} %"


def rate(lr: float) -> str:
    """A learning rate, all its digits."""
    return "default" if math.isnan(lr) else significant(lr, 12)


def milliseconds(seconds: float) -> str:
    return significant(1000 * seconds)


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return MISSING
    if seconds < 90:
        return f"{significant(seconds)} s"
    return f"{significant(seconds / 60)} min" if seconds < 5400 else f"{significant(seconds / 3600)} h"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def wrapped(text: str, length: int, lines: int) -> list[str]:
    """At most so many lines of at most so many characters; ``…`` where more would follow."""
    return textwrap.wrap(text, length, max_lines=lines, placeholder="…") or [""]


def brief(label: str) -> str:
    """``OCNOpt curvature=kronecker`` is ``OCNOpt kronecker``, where the value speaks for itself."""
    words = []
    for word in label.split():
        key, equals, value = word.partition("=")
        words.append(value if equals and key and len(value) > 3 and value.isidentifier() else word)
    return " ".join(words)


def plain(value: object) -> str:
    """A setting as text."""
    match value:
        case bool():
            return "on" if value else "off"
        case float():
            return significant(value, 12)
        case list() | tuple():
            return ", ".join(plain(item) for item in value)
        case None:
            return MISSING
        case _:
            return str(value)

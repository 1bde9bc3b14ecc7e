"""Is a whole training step being captured in a CUDA graph, from the forward pass to the last update?

Then nothing runs until all of it is written down, nobody comes between the backward pass and the step, and whoever
captures has made sure that no random number must be drawn a second time. What guards against these can be left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_underway = False


def underway() -> bool:
    return _underway


@contextmanager
def captured() -> Iterator[None]:
    global _underway
    before, _underway = _underway, True
    try:
        yield
    finally:
        _underway = before

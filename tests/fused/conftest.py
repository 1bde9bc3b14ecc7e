"""What tests of the kernels share."""

from __future__ import annotations

from typing import Any

import pytest

from ocnopt.fused.native.actor import NativeActor


@pytest.fixture
def acted(monkeypatch: pytest.MonkeyPatch) -> list[NativeActor]:
    """Who has acted by the kernels."""
    seen: list[NativeActor] = []
    real = NativeActor._act

    def noted(self: NativeActor, *args: Any, **options: Any) -> None:
        seen.append(self)
        real(self, *args, **options)

    monkeypatch.setattr(NativeActor, "_act", noted)
    return seen

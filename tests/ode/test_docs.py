"""The example is short, it learns, and the page shows it as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "neural_ode.py"


@pytest.mark.slow  # tests/docs runs the same lines, without looking at what comes out
def test_the_example_learns() -> None:
    run = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = re.search(r"accuracy ([\d.]+) %", run.stdout)
    assert found is not None
    assert float(found[1]) > 95
    assert "1.field.0.layer" in run.stdout


def test_the_page_shows_the_example() -> None:
    code = EXAMPLE.read_text(encoding="utf-8")
    assert len(code.splitlines()) <= 40
    assert code in (ROOT / "docs" / "ode.md").read_text(encoding="utf-8")

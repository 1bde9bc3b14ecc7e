"""The kernels in Triton's interpreter, where there is no GPU. Triton is told of it when it is first imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__)


@pytest.mark.parametrize(
    ("file", "least"), [("checks.py", 40), ("checks_groups.py", 35), ("checks_sums.py", 35), ("checks_layers.py", 20)]
)
def test_the_kernels_do_what_plain_operations_do(file: str, least: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    given = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTEST_XDIST_WORKER": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE.with_name(file))]
    done = subprocess.run(command, cwd=HERE.parents[2], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= least

"""The benchmark runs end to end."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_the_benchmark_measures_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # as Python itself does for a script
    spec = importlib.util.spec_from_file_location("benchmark_ode", BENCHMARKS / "ode.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "benchmark_ode", script)
    spec.loader.exec_module(script)
    out = tmp_path / "ode.json"
    assert script.main(["--application", "flow", "--rounds", "2", "--threads", "1", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["refresh_ms"] > 0
    assert row["memory_mib"]["ocnopt"] > 1
    assert "| flow |" in capsys.readouterr().out

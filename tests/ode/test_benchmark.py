"""The benchmark runs end to end."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # as Python itself does for a script
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, f"benchmark_{name}", script)
    spec.loader.exec_module(script)
    return script


def test_the_page_has_the_numbers_of_the_rules(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load("quadrature", monkeypatch).main() == 0
    printed = [line.replace("e-0", "e-") for line in capsys.readouterr().out.splitlines()[2:]]
    page = (BENCHMARKS.parent / "docs" / "ode.md").read_text(encoding="utf-8").replace("−", "-")
    assert len(printed) == 6
    for line in printed:  # the last digit depends on the machine
        row = line.replace("| 0.001 |", "| 1e-3 |")
        assert row.split("|")[4:7] == next(
            r.split("|")[4:7] for r in page.splitlines() if r.split("|")[1:4] == row.split("|")[1:4]
        )


@pytest.mark.slow
def test_the_benchmark_measures_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load("ode", monkeypatch)
    out = tmp_path / "ode.json"
    assert script.main(["--application", "flow", "--rounds", "2", "--threads", "1", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["refresh_ms"] > 0
    assert row["memory_mib"]["ocnopt"] > 1
    assert "| flow |" in capsys.readouterr().out

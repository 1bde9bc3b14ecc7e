"""Runs on disk: what a killed writer leaves behind never breaks a reader."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ocnopt.lab import toml
from ocnopt.lab.runs import MetricsWriter, RunError, RunFolder, find_runs, read_metrics

RECORDS = [{"kind": "step", "step": 1, "loss": 0.1 + 0.2}, {"kind": "final", "name": "schön\n", "diverged": False}]


def written(path: Path) -> bytes:
    writer = MetricsWriter(path)
    for record in RECORDS:
        writer.write(record)
    writer.close()
    return path.read_bytes()


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    written(tmp_path / "m")
    assert read_metrics(tmp_path / "m") == RECORDS


def test_a_reader_sees_each_record_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m")
    assert read_metrics(tmp_path / "m") == []
    writer.write(RECORDS[0])
    assert read_metrics(tmp_path / "m") == RECORDS[:1]
    writer.close()


def test_a_file_cut_at_any_byte_gives_the_complete_records(tmp_path: Path) -> None:
    data = written(tmp_path / "m")
    for length in range(len(data) + 1):
        (tmp_path / "cut").write_bytes(data[:length])
        assert read_metrics(tmp_path / "cut") == RECORDS[: data[:length].count(b"\n")]


def test_a_new_writer_removes_a_half_written_line(tmp_path: Path) -> None:
    data = written(tmp_path / "m")
    (tmp_path / "m").write_bytes(data[:-5])
    writer = MetricsWriter(tmp_path / "m")
    writer.write(RECORDS[1])
    writer.close()
    assert (tmp_path / "m").read_bytes() == data


def test_a_writer_goes_on_where_the_checkpoint_was_taken(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m")
    writer.write(RECORDS[0])
    size = writer.sync()
    writer.write({"kind": "step", "step": 99})
    writer.close()
    writer = MetricsWriter(tmp_path / "m", keep=size)
    writer.write(RECORDS[1])
    writer.close()
    assert read_metrics(tmp_path / "m") == RECORDS


@pytest.mark.parametrize("keep", [10, 10_000])
def test_metrics_that_do_not_belong_to_the_checkpoint_are_refused_and_kept(tmp_path: Path, keep: int) -> None:
    data = written(tmp_path / "m")
    with pytest.raises(RunError, match="cannot be continued"):
        MetricsWriter(tmp_path / "m", keep=keep)
    assert (tmp_path / "m").read_bytes() == data


@pytest.mark.parametrize("line", [b"{oops}\n", b"[1]\n", b'{"step":1}\n', b'{"kind":"step","st\xff' + b"garbage\n"])
def test_a_torn_line_in_the_middle_is_left_out_and_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "m").write_bytes(b'{"kind":"step"}\n' + line + b'{"kind":"final"}\n')
    with pytest.warns(UserWarning, match="m: line 2 is no record of a run and left out"):
        assert read_metrics(tmp_path / "m") == [{"kind": "step"}, {"kind": "final"}]
    (tmp_path / "m").write_bytes(3 * line)
    with pytest.warns(UserWarning, match="m: lines 1, 2, 3 are no record"):
        assert read_metrics(tmp_path / "m") == []


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "m")
    writer.write({"kind": "layers", "loss": float("nan"), "layers": [{"s": float("-inf"), "w_min": 1.5}]})
    writer.close()
    (record,) = read_metrics(tmp_path / "m")
    assert record == {"kind": "layers", "loss": None, "layers": [{"s": None, "w_min": 1.5}]}


def test_a_folder_is_created_once(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "b", {"label": "x", "data": {"name": "WINE"}})
    assert folder.config() == {"label": "x", "data": {"name": "WINE"}}
    assert (folder.final(), folder.metrics(), folder.environment(), folder.load_checkpoint()) == (None, [], {}, None)
    with pytest.raises(RunError, match="holds a run already"):
        RunFolder.create(tmp_path / "a" / "b", {"label": "y"})
    assert folder.config()["label"] == "x"
    with pytest.raises(RunError, match="holds no run"):
        RunFolder(tmp_path / "a").config()


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.save_checkpoint({"x": torch.arange(3), "step": 1})
    assert {path.name for path in folder.path.iterdir()} == {"config.toml", "checkpoint.pt"}
    with pytest.raises(TypeError):
        folder.save_checkpoint({"x": (i for i in range(3))})  # a crash while writing
    state = folder.load_checkpoint()
    assert state is not None
    assert state["step"] == 1
    assert state["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-100], lambda data: b"rubbish"])
def test_a_damaged_checkpoint_is_one_sentence(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.save_checkpoint({"x": torch.arange(300), "step": 1})
    folder.checkpoint_path.write_bytes(damage(folder.checkpoint_path.read_bytes()))
    with pytest.raises(RunError, match=r"checkpoint\.pt is damaged: .* delete it to begin the run anew"):
        folder.load_checkpoint()


def test_damaged_text_files_are_one_sentence(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.config_path.write_bytes(b"label = \xff")
    folder.environment_path.write_text("{")
    with pytest.raises(RunError, match=r"config\.toml is no configuration of a run"):
        folder.config()
    with pytest.raises(RunError, match=r"environment\.json is no record of an environment"):
        folder.environment()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    with folder.locked(), pytest.raises(RunError, match="another process"), RunFolder(folder.path).locked():
        pass
    with folder.locked():
        pass


def test_runs_are_found_below_a_folder_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a", "c/d"):
        RunFolder.create(tmp_path / name, {"label": name})
    (tmp_path / "empty").mkdir()
    found = find_runs([tmp_path, "c"])
    assert [f.config()["label"] for f in found] == ["a", "b", "c/d"]
    with pytest.raises(RunError, match="no folder"):
        find_runs([tmp_path / "nowhere"])


def test_toml_is_read_back_as_it_was_written() -> None:
    table = {
        "label": 'quo"te\\ \n\x7f é',
        "none": None,
        "data": {"n": 3, "f": 1e-05, "big": 1e300, "inf": float("inf"), "yes": True, "list": [0.0, 1.0]},
        "empty": {},
        "grids": {"a key": {"deep": {"x": -1}}},
    }
    expected = {key: value for key, value in table.items() if value is not None}
    assert tomllib.loads(toml.dumps(table)) == expected
    with pytest.raises(TypeError, match="no way to write"):
        toml.dumps({"x": object()})


def test_the_environment_is_plain_json(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {})
    folder.write_environment({"torch": "2", "threads": 1})
    assert json.loads(folder.environment_path.read_text()) == {"torch": "2", "threads": 1} == folder.environment()

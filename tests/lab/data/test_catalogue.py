"""The rows behind ``ocnopt data list`` and ``ocnopt data check``."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lab.data import writers

from ocnopt.lab.data import NAMES, check, check_all, list_datasets, registry


def test_the_list_has_every_dataset_of_the_paper_and_a_text() -> None:
    rows = list_datasets()
    assert tuple(row.name for row in rows) == NAMES
    assert NAMES == (
        "WINE",
        "DIGITS",
        "MNIST",
        "FMNIST",
        "SVHN",
        "CIFAR10",
        "CIFAR100",
        "SpokenArabicDigits",
        "ArticularyWordRecognition",
        "CharacterTrajectories",
        "Circle",
        "Gas",
        "Miniboone",
        "Genesis",
    )


def test_the_list_says_what_is_there(tmp_path: Path) -> None:
    writers.write_svhn(tmp_path / "svhn")
    rows = {row.name: row for row in list_datasets(tmp_path)}
    assert (rows["SVHN"].status, rows["SVHN"].where) == ("found", str(tmp_path / "svhn"))
    assert (rows["MNIST"].status, rows["MNIST"].where) == ("missing", "")
    assert rows["DIGITS"].status == "built in"
    assert [name for name in ("SVHN", "MNIST", "DIGITS") if rows[name].official] == ["DIGITS"]
    mnist = rows["MNIST"]
    assert (mnist.train, mnist.validation, mnist.test, mnist.classes) == (60000, 0, 10000, 10)
    assert mnist.download_bytes == 9912422 + 28881 + 1648877 + 4542
    assert rows["Gas"].download_bytes is None  # unknown, and not 0
    assert rows["SVHN"].licence == "non-commercial use only"


def test_the_list_tells_official_files_from_others_by_their_names_and_sizes(tmp_path: Path) -> None:
    for remote in registry.ENTRIES["MNIST"].remotes:
        path = tmp_path / "mnist" / remote.filename
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.truncate(remote.size)
    (tmp_path / "cifar-10-python-subset.tar.xz").touch()
    assert {row.name for row in list_datasets(tmp_path) if row.where and row.official} == {"MNIST"}
    assert {row.name for row in list_datasets(tmp_path) if row.where and not row.official} == {"CIFAR10"}
    path.write_bytes(b"cut short")
    assert not [row.name for row in list_datasets(tmp_path) if row.where and row.official]


def test_the_list_opens_no_file(tmp_path: Path) -> None:
    (tmp_path / "svhn").mkdir()
    for name in ("train_32x32.mat", "test_32x32.mat"):
        (tmp_path / "svhn" / name).write_bytes(b"rubbish")
    assert {row.name: row.status for row in list_datasets(tmp_path)}["SVHN"] == "found"


@pytest.mark.parametrize(("name", "sizes"), [("WINE", (142, 0, 36)), ("Circle", (10000, 2000, 2000))])
def test_check_of_built_in_data(name: str, sizes: tuple[int, int, int]) -> None:
    row = check(name)
    assert (row.status, (row.train, row.validation, row.test)) == ("complete", sizes)


def test_check_of_a_subset_says_how_much_is_there(tmp_path: Path) -> None:
    writers.write_idx_set(tmp_path / "mnist")
    row = check("mnist", tmp_path)
    assert (row.name, row.status, row.train, row.test) == ("MNIST", "subset", 20, 10)
    assert row.where == str(tmp_path / "mnist")
    assert "20 train, 10 test instead of the 60,000 train" in row.message


def test_check_of_missing_and_broken_data_explains_and_does_not_raise(tmp_path: Path) -> None:
    row = check("SVHN", tmp_path)
    assert row.status == "missing"
    assert "ocnopt data fetch SVHN" in row.message
    writers.write_svhn(tmp_path)
    (tmp_path / "test_32x32.mat").write_bytes(b"rubbish")
    row = check("SVHN", tmp_path)
    assert (row.status, row.where) == ("broken", str(tmp_path))
    assert "test_32x32.mat is not a readable MATLAB 5 file" in row.message


def test_check_finds_a_class_without_samples(tmp_path: Path) -> None:
    writers.write_svhn(tmp_path, labels=(1, 2, 3, 4, 5, 6, 7, 8, 9))
    row = check("SVHN", tmp_path)
    assert row.status == "broken"
    assert "The train part has no sample of 1 classes, the first being 0." in row.message


def test_check_finds_series_of_the_wrong_kind(tmp_path: Path) -> None:
    for part in ("TRAIN", "TEST"):
        content = writers.ts_text(["1,2:3,4:up", "5,6:7,8:down"])
        (tmp_path / f"CharacterTrajectories_{part}.ts").write_bytes(content)
    row = check("CharacterTrajectories", tmp_path)
    assert row.status == "broken"
    assert "Samples have the shape (2, 2) instead of (182, 3)." in row.message
    assert "There are 2 classes instead of 20." in row.message


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="no dataset named 'IMAGENET'"):
        check("IMAGENET")


def test_check_all_has_a_row_for_each() -> None:
    rows = check_all()
    assert tuple(row.name for row in rows) == NAMES
    assert [row.name for row in rows if row.status == "complete"] == ["WINE", "DIGITS", "Circle", "Genesis"]
    assert {row.status for row in rows} == {"complete", "missing"}

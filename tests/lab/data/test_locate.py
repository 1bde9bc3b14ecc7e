"""Where data is searched, and what is said when there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.lab.data import writers

from ocnopt.lab.data import MissingDataError, find_entry, load, registry
from ocnopt.lab.data.digests import file_digest
from ocnopt.lab.data.locate import cache_dir, locate, search_path


def first_pixel(name: str, folder: Path | str | None = None) -> int:
    return int(load(name, folder).train.values[0, 0, 0, 0])


def pixel_of(seed: int) -> int:
    return int(writers.idx_arrays(seed=seed)[0][0, 0, 0])


def test_the_named_folder_comes_before_the_variable_and_that_before_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = [pixel_of(seed) for seed in (1, 2, 3)]
    assert len(set(pixels)) == 3
    writers.write_idx_set(cache / "mnist", seed=3)
    assert first_pixel("MNIST") == pixels[2]
    writers.write_idx_set(tmp_path / "variable" / "mnist", seed=2)
    monkeypatch.setenv("OCNOPT_DATA", str(tmp_path / "variable"))
    assert first_pixel("MNIST") == pixels[1]
    writers.write_idx_set(tmp_path / "named" / "mnist", seed=1)
    assert first_pixel("MNIST", tmp_path / "named") == pixels[0]
    assert first_pixel("MNIST", str(tmp_path / "elsewhere")) == pixels[1]
    assert search_path(tmp_path) == [tmp_path, tmp_path / "variable", cache]


def test_an_empty_variable_is_no_variable_and_a_tilde_is_the_home(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("OCNOPT_DATA", "")
    assert search_path() == [cache]
    monkeypatch.setenv("OCNOPT_DATA", "~/sets")
    assert search_path()[0] == Path.home() / "sets"
    monkeypatch.setenv("OCNOPT_CACHE", "~/kept")
    assert cache_dir() == Path.home() / "kept"
    monkeypatch.delenv("OCNOPT_CACHE")
    assert "ocnopt" in cache_dir().parts


@pytest.mark.parametrize("folder", [".", "mnist", "MNIST", "MNIST/raw", "data/mnist", "M-NIST"])
def test_files_may_lie_in_the_folder_itself_or_in_one_named_after_the_dataset(tmp_path: Path, folder: str) -> None:
    writers.write_idx_set(tmp_path / folder)
    found = locate(find_entry("MNIST"), tmp_path)
    assert found is not None
    assert found.folder == (tmp_path / folder if folder != "." else tmp_path)


@pytest.mark.parametrize("folder", ["fashion_mnist", "FashionMNIST", "fmnist", "Fashion-MNIST"])
def test_folders_of_other_datasets_are_not_looked_into(tmp_path: Path, folder: str) -> None:
    writers.write_idx_set(tmp_path / folder)
    assert locate(find_entry("FMNIST"), tmp_path) is not None
    assert locate(find_entry("MNIST"), tmp_path) is None


def test_series_may_lie_in_a_collection(tmp_path: Path) -> None:
    folder = tmp_path / "Multivariate_ts" / "SpokenArabicDigits"
    folder.mkdir(parents=True)
    for part in ("TRAIN", "TEST"):
        (folder / f"SpokenArabicDigits_{part}.ts").write_bytes(writers.ts_text(["1:2:up"]))
    found = locate(find_entry("SpoAD"), tmp_path)
    assert found is not None
    assert found.folder == folder


def test_mnist_files_are_not_taken_for_fmnist_though_they_have_the_same_names(
    tmp_path: Path, publish: Callable[..., None]
) -> None:
    writers.write_idx_set(tmp_path)
    assert locate(find_entry("FMNIST"), tmp_path) is not None  # nobody's files: the user knows best
    images, labels, *others = registry.ENTRIES["MNIST"].remotes
    official = replace(labels, checksum=f"sha256:{file_digest(tmp_path / labels.filename)}")
    publish("MNIST", remotes=(images, official, *others))
    assert locate(find_entry("FMNIST"), tmp_path) is None
    assert locate(find_entry("MNIST"), tmp_path) is not None


def test_the_official_archive_is_preferred_to_a_subset(tmp_path: Path) -> None:
    writers.write_tar(tmp_path / "cifar-10-python-subset.tar.xz", writers.cifar10_members((1,)))
    assert len(load("CIFAR10", tmp_path).train) == 10
    writers.write_tar(tmp_path / "cifar-10-python.tar.gz", writers.cifar10_members((1, 2)))
    assert len(load("CIFAR10", tmp_path).train) == 20


def test_cifar100_is_not_taken_for_cifar10(tmp_path: Path) -> None:
    writers.write_tar(tmp_path / "cifar-100-python.tar.gz", writers.cifar100_members())
    assert locate(find_entry("CIFAR10"), tmp_path) is None


def test_missing_data_gives_one_sentence_what_where_and_how(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(MissingDataError) as caught:
        load("SVHN", tmp_path)
    assert str(caught.value) == (
        f"SVHN was not found in {tmp_path}, {cache} (no such folder): "
        "put train_32x32.mat and test_32x32.mat from http://ufldl.stanford.edu/housenumbers/ "
        f"into {tmp_path / 'svhn'}, name another folder with --data-dir or OCNOPT_DATA, "
        "or run `ocnopt data fetch SVHN`."
    )
    assert isinstance(caught.value, FileNotFoundError)


def test_missing_data_says_which_file_of_several_is_not_there(tmp_path: Path) -> None:
    writers.write_idx_set(tmp_path / "mnist")
    (tmp_path / "mnist" / writers.IDX_NAMES[3]).unlink()
    with pytest.raises(MissingDataError, match=r"mnist has no t10k-labels-idx1-ubyte\.gz\): put"):
        load("MNIST", tmp_path)


@pytest.mark.parametrize("name", [n for n in registry.NAMES if not registry.ENTRIES[n].built_in])
def test_every_dataset_with_files_can_say_that_it_is_missing(name: str) -> None:
    with pytest.raises(MissingDataError, match=f"run `ocnopt data fetch {name}`"):
        load(name)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("mnist", "MNIST"),
        ("fashion-mnist", "FMNIST"),
        ("FashionMNIST", "FMNIST"),
        ("cifar-10", "CIFAR10"),
        ("spoad", "SpokenArabicDigits"),
        ("ArtWR", "ArticularyWordRecognition"),
        ("character_trajectories", "CharacterTrajectories"),
    ],
)
def test_names_count_in_any_case_and_spelling(alias: str, name: str) -> None:
    assert find_entry(alias).name == name


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no dataset named 'CIFAR1O'.*Did you mean CIFAR10\?") as caught:
        load("CIFAR1O")
    assert "WINE, DIGITS, MNIST" in str(caught.value)


def test_the_table_is_consistent() -> None:
    for entry in registry.ENTRIES.values():
        assert entry.built_in == (not entry.remotes) == (not entry.folders)
        assert (entry.task == "density") == (entry.classes == 0)
        for remote in entry.remotes:
            algorithm, _, digest = (remote.checksum or "sha256:" + 64 * "0").partition(":")
            assert len(digest) == {"sha256": 64, "md5": 32}[algorithm]
            assert all(url.startswith("http") for url in remote.urls)

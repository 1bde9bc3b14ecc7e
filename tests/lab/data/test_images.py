"""IDX, MATLAB and CIFAR files, good and bad."""

from __future__ import annotations

import gzip
import lzma
import pickle
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from tests.lab.data import writers

from ocnopt.lab.data import DataFormatError, load
from ocnopt.lab.data.formats.idx import read_idx
from ocnopt.lab.data.formats.mat import read_svhn_mat

# ---- IDX


@pytest.mark.parametrize("name", ["MNIST", "FMNIST"])
@pytest.mark.parametrize("compressed", [True, False])
def test_an_idx_set_is_read_as_written(tmp_path: Path, name: str, compressed: bool) -> None:
    arrays = writers.write_idx_set(tmp_path / name.lower(), compressed=compressed)
    data = load(name, tmp_path)
    for split, images, labels in ((data.train, *arrays[:2]), (data.test, *arrays[2:])):
        assert np.array_equal(split.values.numpy()[:, 0], images)
        assert split.y.tolist() == labels.tolist()
        assert split.y.dtype == torch.int64
    assert (data.input_shape, data.train.x.shape[1:]) == ((1, 28, 28), (1, 28, 28))
    assert data.subset
    assert data.notes == ("20 train, 10 test instead of the 60,000 train, 10,000 test of the published set.",)


def test_names_with_a_dot_as_other_libraries_write_them(tmp_path: Path) -> None:
    for name, array in zip(writers.IDX_NAMES, writers.idx_arrays(), strict=True):
        dotted = name.removesuffix(".gz").replace("-idx", ".idx")
        (tmp_path / dotted).write_bytes(writers.idx_bytes(array))
    assert len(load("MNIST", tmp_path).train) == 20


IMAGES = writers.idx_bytes(np.zeros((2, 28, 28), dtype=np.uint8))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not begin with the IDX magic number"),
        (b"GIF89a" + IMAGES, "does not begin with the IDX magic number"),
        (b"\0\0\x0d\x03" + IMAGES[4:], "but has type 0x0d in 3 dimensions"),
        (b"\0\0\x08\x01" + IMAGES[4:], "but has type 0x08 in 1 dimensions"),
        (IMAGES[:10], "its header is incomplete"),
        (IMAGES[:-1], "should hold 1568 values of shape .* but holds 1567"),
        (IMAGES + b"\0", "should hold 1568 values of shape .* but holds 1569"),
        (gzip.compress(IMAGES, mtime=0)[:-20], "is damaged or cut short"),
        (gzip.compress(IMAGES, mtime=0)[:5], "is damaged or cut short"),
        (b"\x1f\x8b" + b"nonsense" * 4, "is damaged or cut short"),
        (lzma.compress(IMAGES)[:-12], "is damaged or cut short"),
    ],
)
def test_a_bad_idx_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(DataFormatError, match=message) as caught:
        read_idx(path, dimensions=3)
    assert str(path) in str(caught.value)


def test_a_flipped_bit_in_a_gzip_file_is_noticed(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(IMAGES, mtime=0))
    content[-6] ^= 1  # in the sum that gzip keeps at the end
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(DataFormatError, match="damaged"):
        read_idx(path, dimensions=3)


@pytest.mark.parametrize(
    ("file", "array", "message"),
    [
        (0, np.zeros((20, 14, 14), np.uint8), "images of 28x28, not"),
        (1, np.zeros(19, np.uint8), "has 19 labels for 20 images"),
        (1, np.full(20, 10, np.uint8), "labels 10 to 10, beyond its 10 classes"),
        (0, np.zeros((0, 28, 28), np.uint8), "has 20 labels for 0 images"),
    ],
)
def test_parts_that_do_not_fit_together(tmp_path: Path, file: int, array: np.ndarray, message: str) -> None:
    writers.write_idx_set(tmp_path)
    (tmp_path / writers.IDX_NAMES[file]).write_bytes(writers.idx_bytes(array))
    with pytest.raises(DataFormatError, match=message):
        load("MNIST", tmp_path)


# ---- MATLAB


def test_svhn_is_turned_around_and_the_digit_0_is_class_0(tmp_path: Path) -> None:
    x = writers.write_svhn(tmp_path / "svhn")
    data = load("SVHN", tmp_path)
    assert data.train.y.tolist() == [1, 0, 3, 5, 2, 4, 6, 7, 8, 9]
    assert np.array_equal(data.train.values[4].numpy(), x[:, :, :, 4].transpose(2, 0, 1))
    assert data.classes == tuple("0123456789")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"y": np.ones((2, 1))}, "has no variable 'X'"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "has no variable 'y'"),
        ({"X": np.zeros((32, 32, 3, 2)), "y": np.ones((2, 1))}, "must be bytes of shape"),
        ({"X": np.zeros((2, 32, 32, 3), np.uint8), "y": np.ones((2, 1))}, "must be bytes of shape"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((3, 1))}, "has 2 images but 3 labels"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.zeros((2, 1))}, "labels 1 to 10"),
    ],
)
def test_a_bad_matlab_file_is_named(tmp_path: Path, variables: dict[str, np.ndarray], message: str) -> None:
    path = tmp_path / "train_32x32.mat"
    scipy.io.savemat(path, variables)
    with pytest.raises(DataFormatError, match=message):
        read_svhn_mat(path)


@pytest.mark.parametrize("keep", [0, 60, 300, -100])
def test_a_matlab_file_that_is_cut_short(tmp_path: Path, keep: int) -> None:
    writers.write_svhn(tmp_path)
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataFormatError, match="not a readable MATLAB 5 file"):
        read_svhn_mat(path)


# ---- CIFAR


@pytest.mark.parametrize("archive", ["cifar-10-python.tar.gz", "cifar-10-python-subset.tar.xz"])
def test_cifar10_from_an_archive(tmp_path: Path, archive: str) -> None:
    writers.write_tar(tmp_path / "cifar10" / archive, writers.cifar10_members(batches=(2, 1)))
    data = load("CIFAR10", tmp_path)
    rows = np.concatenate([writers.cifar_rows(10, 1), writers.cifar_rows(10, 2)])
    assert np.array_equal(data.train.values.numpy(), rows.reshape(-1, 3, 32, 32))
    assert data.train.y.tolist() == list(range(10)) * 2
    assert data.test.y.tolist() == list(range(9, -1, -1))
    assert data.classes[:2] == ("kind0", "kind1")
    assert data.subset


def test_cifar10_that_somebody_unpacked(tmp_path: Path) -> None:
    for name, content in writers.cifar10_members().items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    assert len(load("CIFAR10", tmp_path).train) == 20


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_cifar100_has_fine_labels_and_may_be_pickled_by_python_3(tmp_path: Path, protocol: int) -> None:
    def dump(value: object) -> bytes:
        return pickle.dumps(value, protocol)

    writers.write_tar(tmp_path / "cifar-100-python.tar.gz", writers.cifar100_members(dump))
    data = load("CIFAR100", tmp_path)
    assert data.train.y.tolist() == list(range(100))
    assert np.array_equal(data.test.values.numpy().reshape(100, -1), writers.cifar_rows(100, 2))
    assert (len(data.classes), data.classes[7]) == (100, "fine7")


BATCH = "cifar-10-batches-py/data_batch_1"
META = "cifar-10-batches-py/batches.meta"
ROWS = writers.cifar_rows(2, 0)


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        (BATCH, [1, 2], "holds a list instead of a dictionary"),
        (BATCH, {b"labels": [0, 1]}, "has no field 'data'"),
        (BATCH, {b"data": ROWS}, "has no field 'labels'"),
        (BATCH, {b"data": ROWS[:, :100].copy(), b"labels": [0, 1]}, "rows of 3072"),
        (BATCH, {b"data": ROWS.astype(np.float32), b"labels": [0, 1]}, "array of bytes"),
        (BATCH, {b"data": [1, 2], b"labels": [0, 1]}, "array of bytes"),
        (BATCH, {b"data": ROWS, b"labels": [0, 1, 2]}, "has 2 images but 3 labels"),
        (BATCH, {b"data": ROWS, b"labels": [0, b"1"]}, "list of integers"),
        (BATCH, {b"data": ROWS, b"labels": [0, 10]}, "beyond its 10 classes"),
        (META, {b"label_names": [b"a"]}, "names 1 classes instead of 10"),
        (META, {b"other": 1}, "no names of the classes"),
    ],
)
def test_a_bad_cifar_batch_is_named(tmp_path: Path, member: str, value: object, message: str) -> None:
    members = writers.cifar10_members(batches=(1,)) | {member: writers.python2_pickle(value)}
    writers.write_tar(tmp_path / "cifar-10-python.tar.gz", members)
    with pytest.raises(DataFormatError, match=message) as caught:
        load("CIFAR10", tmp_path)
    assert "cifar-10-python.tar.gz" in str(caught.value)


@pytest.mark.parametrize("suffix", ["gz", "xz"])
def test_an_archive_that_is_cut_short(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cifar-10-python.tar.{suffix}"
    writers.write_tar(path, writers.cifar10_members())
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataFormatError, match="is damaged or cut short"):
        load("CIFAR10", tmp_path)


def test_an_archive_without_the_test_batch(tmp_path: Path) -> None:
    members = writers.cifar10_members()
    del members["cifar-10-batches-py/test_batch"]
    writers.write_tar(tmp_path / "cifar-10-python.tar.gz", members)
    with pytest.raises(DataFormatError, match="holds no file named test_batch"):
        load("CIFAR10", tmp_path)


def test_a_pickle_that_is_cut_short(tmp_path: Path) -> None:
    members = writers.cifar10_members()
    members[BATCH] = members[BATCH][:-500]
    writers.write_tar(tmp_path / "cifar-10-python.tar.gz", members)
    with pytest.raises(DataFormatError, match="data_batch_1 is not a readable pickle"):
        load("CIFAR10", tmp_path)

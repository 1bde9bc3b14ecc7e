"""CIFAR-10 and Fashion-MNIST from their official files, as tensors, with standardised pixels."""

from __future__ import annotations

import codecs
import gzip
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Images(NamedTuple):
    """Pixels `[n, channels, side, side]` and labels `[n]`, for training and for the test."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def to(self, device: str) -> Images:
        return Images(*(tensor.to(device) for tensor in self))

    def first(self, count: int | None) -> Images:
        """Only the first `count` training images."""
        return self._replace(train_x=self.train_x[:count], train_y=self.train_y[:count])


class _OnlyArrays(pickle.Unpickler):
    """A pickle can run any code; these need numpy's arrays and nothing else."""

    # By name alone: the modules that old files ask for have moved between numpy's versions.
    ALLOWED: ClassVar[dict[str, Any]] = {
        "_reconstruct": np.empty(0).__reduce__()[0],
        "ndarray": np.ndarray,
        "dtype": np.dtype,
        "encode": codecs.encode,  # how Python 3 writes bytes in the old protocols
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("numpy", "_codecs") and name in self.ALLOWED:
            return self.ALLOWED[name]
        raise pickle.UnpicklingError(f"the file asks for {module}.{name}, which no CIFAR batch needs")


def _find(root: Path, *patterns: str) -> Path:
    for pattern in patterns:
        if found := sorted(root.glob(pattern)):
            return found[0]
    raise SystemExit(f"no file {patterns[0]} under {root}: name the folder that has it with --data or OCNOPT_DATA")


def _cifar_batch(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    batch = _OnlyArrays(io.BytesIO(data), encoding="bytes").load()
    return batch[b"data"].reshape(-1, 3, 32, 32), np.asarray(batch[b"labels"])


def _standardised(train_x: np.ndarray, train_y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray) -> Images:
    """Subtract each channel's mean and divide by its deviation, both taken over the training images."""
    train, test = (torch.from_numpy(x.astype(np.float32)) / 255 for x in (train_x, test_x))
    mean, deviation = train.mean((0, 2, 3), keepdim=True), train.std((0, 2, 3), keepdim=True)
    labels = (torch.from_numpy(y.astype(np.int64)) for y in (train_y, test_y))
    train_labels, test_labels = labels
    return Images((train - mean) / deviation, train_labels, (test - mean) / deviation, test_labels)


def cifar10(root: Path) -> Images:
    """The archive of Python pickles, whole or with some of its training batches."""
    path = _find(root, "cifar-10*.tar.*", "*/cifar-10*.tar.*")
    batches: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            name = Path(member.name).name
            if name.startswith("data_batch_") or name == "test_batch":
                file = archive.extractfile(member)
                assert file is not None, f"{member.name} is no file"
                batches[name] = _cifar_batch(file.read())
    train = [batches[name] for name in sorted(batches) if name != "test_batch"]
    if not train or "test_batch" not in batches:
        raise SystemExit(f"{path} has no data_batch_* or no test_batch")
    train_x, train_y = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return _standardised(train_x, train_y, *batches["test_batch"])


def _idx(path: Path) -> np.ndarray:
    """An IDX file: two zero bytes, type 8 (bytes), number of dimensions, big-endian sizes, data."""
    data = gzip.decompress(path.read_bytes())
    if data[:3] != b"\x00\x00\x08":
        raise SystemExit(f"{path} is no IDX file of bytes")
    dimensions = data[3]
    shape = np.frombuffer(data, ">i4", dimensions, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def fashion_mnist(root: Path) -> Images:
    """The four IDX files, in a folder of the data set's name (MNIST's files are called the same)."""
    folder = _find(root, "fashion*/train-images-idx3-ubyte.gz", "Fashion*/**/train-images-idx3-ubyte.gz").parent
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    train_x, train_y, test_x, test_y = (_idx(folder / f"{name}-ubyte.gz") for name in names)
    return _standardised(train_x[:, None], train_y, test_x[:, None], test_y)

"""Small files in the official formats, written byte by byte or with the tools that the originals were made with."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.io

IDX_NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def idx_bytes(array: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def idx_arrays(train: int = 20, test: int = 10, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = []
    for count in (train, test):
        arrays.append(rng.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        arrays.append(np.arange(count, dtype=np.uint8) % 10)
    return arrays


def write_idx_set(folder: Path, seed: int = 0, compressed: bool = True) -> list[np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = idx_arrays(seed=seed)
    for name, array in zip(IDX_NAMES, arrays, strict=True):
        content = idx_bytes(array)
        if compressed:
            (folder / name).write_bytes(gzip.compress(content))
        else:
            (folder / name.removesuffix(".gz")).write_bytes(content)
    return arrays


class _NamePickler(pickle._Pickler):  # type: ignore[name-defined, misc]
    """Writes the name of a class or function without asking whether it can be imported."""

    dispatch = pickle._Pickler.dispatch.copy()  # type: ignore[attr-defined]

    def save_global(self, obj: Any, name: str | None = None) -> None:
        self.write(pickle.GLOBAL + f"{self.module_of(obj)}\n{name or obj.__name__}\n".encode())
        self.memoize(obj)

    def module_of(self, obj: Any) -> str:
        return str(obj.__module__)

    dispatch[type] = save_global
    dispatch[type(len)] = save_global
    dispatch[type(idx_bytes)] = save_global


class _Python2Pickler(_NamePickler):
    """Writes strings as Python 2 did, and numpy's functions under their old names."""

    dispatch = _NamePickler.dispatch.copy()

    def save_string(self, text: bytes | str) -> None:
        content = text.encode("latin1") if isinstance(text, str) else text
        self.write(pickle.BINSTRING + struct.pack("<i", len(content)) + content)
        self.memoize(text)

    def module_of(self, obj: Any) -> str:
        return super().module_of(obj).replace("numpy._core", "numpy.core").replace("builtins", "__builtin__")

    dispatch[bytes] = save_string
    dispatch[str] = save_string


def python2_pickle(value: Any) -> bytes:
    stream = io.BytesIO()
    _Python2Pickler(stream, protocol=2).dump(value)
    return stream.getvalue()


class _Call:
    """Pickles as a call of ``function(*args)``."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def _named(path: str) -> Any:
    """A class that is pickled under a name of pandas, which is not installed."""
    module, name = path.rsplit(".", 1)
    return type(name, (), {"__module__": module, "__getstate__": lambda self: self.state})


def _object(path: str, state: Any) -> Any:
    made = _named(path)()
    made.state = state
    return made


def _index(package: str, labels: np.ndarray) -> _Call:
    arguments = {"data": labels, "name": None}
    return _Call(_named(f"{package}.base._new_Index"), _named(f"{package}.base.Index"), arguments)


def frame_of_2017(table: np.ndarray, names: Sequence[str]) -> bytes:
    """A table as pandas 0.19 pickled it under Python 2: a manager with a state tuple; two blocks of columns."""
    axes = [_index("pandas.indexes", np.array(names, dtype=object)), _index("pandas.indexes", np.arange(len(table)))]
    blocks = [
        {"values": np.asfortranarray(table[:, 1:].T), "mgr_locs": slice(1, table.shape[1], 1)},
        {"values": table[:, :1].T.copy(), "mgr_locs": np.array([0])},
    ]
    state = (axes, [b["values"] for b in blocks], [], {"0.14.1": {"axes": axes, "blocks": blocks}})
    manager = _object("pandas.core.internals.BlockManager", state)
    contents = {"_data": manager, "_typ": "dataframe", "_metadata": []}
    return python2_pickle(_object("pandas.core.frame.DataFrame", contents))


def frame_of_today(table: np.ndarray, names: Sequence[str]) -> bytes:
    """The same as pandas 2 and 3 pickle it: constructor arguments."""
    package = "pandas.core.indexes"
    axes = [_index(package, np.array(names, dtype=object)), _index(package, np.arange(len(table)))]
    new_block = _named("pandas._libs.internals._unpickle_block")
    block = _Call(new_block, table.T, slice(0, table.shape[1], 1), 2)
    manager = _Call(_named("pandas.core.internals.managers.BlockManager"), (block,), axes)
    stream = io.BytesIO()
    frame = _object("pandas.core.frame.DataFrame", {"_mgr": manager, "_typ": "dataframe", "attrs": {}})
    _NamePickler(stream, protocol=5).dump(frame)
    return stream.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:" + path.name.rsplit(".", 1)[1]) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def cifar_rows(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def cifar10_members(batches: Sequence[int] = (1, 2), dump: Any = python2_pickle) -> dict[str, bytes]:
    folder = "cifar-10-batches-py"
    members = {
        f"{folder}/data_batch_{n}": dump({b"data": cifar_rows(10, n), b"labels": list(range(10))}) for n in batches
    }
    members[f"{folder}/test_batch"] = dump({b"data": cifar_rows(10, 9), b"labels": list(range(9, -1, -1))})
    members[f"{folder}/batches.meta"] = dump({b"label_names": [f"kind{n}".encode() for n in range(10)]})
    members[f"{folder}/readme.html"] = b"not a pickle"
    return members


def cifar100_members(dump: Any = python2_pickle) -> dict[str, bytes]:
    def part(seed: int) -> bytes:
        fine = list(range(100))
        coarse = [n // 5 for n in fine]
        return dump({b"data": cifar_rows(100, seed), b"fine_labels": fine, b"coarse_labels": coarse})

    meta = {b"fine_label_names": [f"fine{n}".encode() for n in range(100)], b"coarse_label_names": []}
    files = {"train": part(1), "test": part(2), "meta": dump(meta), "file.txt~": b""}
    return {f"cifar-100-python/{name}": content for name, content in files.items()}


def write_svhn(folder: Path, labels: Sequence[int] = (1, 10, 3, 5, 2, 4, 6, 7, 8, 9)) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    x = np.random.default_rng(0).integers(0, 256, (32, 32, 3, len(labels)), dtype=np.uint8)
    y = np.array(labels, dtype=np.uint8).reshape(-1, 1)
    for name in ("train_32x32.mat", "test_32x32.mat"):
        scipy.io.savemat(folder / name, {"X": x, "y": y}, do_compression=True)
    return x


TS_HEADER = """\
#a comment with a stray byte \x96
@problemName Toy
@timeStamps false
@missing false
@univariate false
@dimensions 2
@equalLength false
@classLabel true up down
@data
"""


def ts_text(rows: Sequence[str], header: str = TS_HEADER) -> bytes:
    return (header + "\n".join(rows) + "\n").encode("latin1")


def arff_dimension(rows: Sequence[str], steps: int, classes: str = "up,down") -> bytes:
    attributes = "".join(f"@attribute channel_0_{n} numeric\n" for n in range(steps))
    head = f"@relation toy\n\n{attributes}@attribute target {{{classes}}}\n\n@data\n"
    return (head + "\n".join(rows) + "\n").encode()


def arff_relational(rows: Sequence[str], steps: int, classes: str = "up,down") -> bytes:
    attributes = "".join(f"\t@attribute att{n} numeric\n" for n in range(steps))
    head = (
        "% a comment\n@relation toy\n"
        f"@attribute relationalAtt relational\n{attributes}@end relationalAtt\n"
        f"@attribute classAttribute {{{classes}}}\n@DATA\n"
    )
    return (head + "\n".join(rows) + "\n").encode()

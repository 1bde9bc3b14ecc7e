"""What the restricted unpickler refuses, and the pandas tables that it reads without pandas."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lab.data import writers

from ocnopt.lab.data import DataFormatError, UnsafePickleError, load
from ocnopt.lab.data.formats.frame import read_frame
from ocnopt.lab.data.formats.pickles import PickledArray, read_pickle


class Call:
    """Pickles as a call of ``function(*args)``."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def global_opcode(module: str, name: str) -> bytes:
    return b"\x80\x02" + pickle.GLOBAL + f"{module}\n{name}\n".encode()


def test_a_malicious_cifar_batch_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    attack = {b"data": Call(os.system, f"touch {trace}"), b"labels": []}
    members = writers.cifar10_members() | {"cifar-10-batches-py/data_batch_1": pickle.dumps(attack, 2)}
    writers.write_tar(tmp_path / "cifar-10-python.tar.gz", members)
    with pytest.raises(UnsafePickleError, match=r"data_batch_1 was refused: .*system, which data never needs"):
        load("CIFAR10", tmp_path)
    assert not trace.exists()
    pickle.loads(pickle.dumps(attack))  # the attack is real: an ordinary unpickler runs it
    assert trace.exists()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("function", [eval, exec, getattr, __import__, open, np.load, pickle.loads])
def test_functions_are_refused_in_every_protocol(function: Callable[..., Any], protocol: int) -> None:
    with pytest.raises(UnsafePickleError):
        read_pickle(pickle.dumps(Call(function, "1"), protocol), "file")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("numpy", "dtype.__class__"),
        ("numpy", "ndarray.__reduce__"),
        ("numpy.core.multiarray", "_reconstruct.__globals__"),
        ("numpy.core.multiarray", "fromfile"),
        ("_codecs", "decode"),
        ("__builtin__", "eval"),
        ("copy_reg", "_reconstructor"),
        ("pandas", "read_pickle"),
    ],
)
def test_names_near_the_allowed_ones_are_refused(module: str, name: str) -> None:
    with pytest.raises(UnsafePickleError, match=name):
        read_pickle(global_opcode(module, name) + b".", "file")
    dotted = b"\x80\x04" + b"".join(
        pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module, name)
    )
    with pytest.raises(UnsafePickleError, match=name):
        read_pickle(dotted + pickle.STACK_GLOBAL + b".", "file")


def test_objects_outside_the_pickle_other_codecs_and_element_types_are_refused() -> None:
    with pytest.raises(UnsafePickleError, match="outside itself"):
        read_pickle(b"\x80\x02K\x01" + pickle.BINPERSID + b".", "file")
    codec = global_opcode("_codecs", "encode") + b"X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R."
    with pytest.raises(UnsafePickleError, match="codec 'rot13'"):
        read_pickle(codec, "file")
    with pytest.raises(UnsafePickleError, match="element type 'M8'"):
        read_pickle(pickle.dumps(np.zeros(2, dtype="M8[s]"), 2), "file")
    with pytest.raises(UnsafePickleError, match="element type 'V8'"):
        read_pickle(pickle.dumps(np.zeros(2, dtype="i4,i4"), 2), "file")


def test_an_array_may_not_claim_more_than_it_has() -> None:
    good = writers.python2_pickle(np.arange(10, dtype=np.uint8))
    assert good.count(struct.pack("<BB", ord("K"), 10)) == 1
    with pytest.raises(DataFormatError, match="does not have the bytes it needs"):
        read_pickle(good.replace(struct.pack("<BB", ord("K"), 10), struct.pack("<BB", ord("K"), 200)), "file")


@pytest.mark.parametrize("dump", [writers.python2_pickle, *(lambda v, p=p: pickle.dumps(v, p) for p in range(6))])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.uint8).reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(6, dtype=">i4"),
        np.array([True, False]),
    ],
)
def test_arrays_are_read_as_written(array: np.ndarray, dump: Callable[[Any], bytes]) -> None:
    read = read_pickle(dump({"a": [array]}), "file")
    (values,) = read.values()
    assert isinstance(values[0], PickledArray)
    assert values[0].array is not None
    assert np.array_equal(values[0].array, array)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x80\x02}", b"\x80\x05\x95" + b"\xff" * 8])
def test_what_is_no_pickle_is_named(content: bytes) -> None:
    with pytest.raises(DataFormatError, match="some/file is not a readable pickle"):
        read_pickle(content, "some/file")


# ---- tables of pandas


@pytest.mark.parametrize("write", [writers.frame_of_2017, writers.frame_of_today])
def test_a_table_of_pandas_is_read_without_pandas(write: Callable[[np.ndarray, list[str]], bytes]) -> None:
    table = np.random.default_rng(0).normal(size=(7, 4))
    columns = read_frame(write(table, ["Time", "Meth", "Eth", "s1"]), "file")
    assert list(columns) == ["Time", "Meth", "Eth", "s1"]
    assert np.array_equal(np.stack(list(columns.values()), axis=1), table)


def test_a_table_may_not_call_anything_either(tmp_path: Path) -> None:
    with pytest.raises(UnsafePickleError, match="system"):
        read_frame(pickle.dumps({"_mgr": Call(os.system, f"touch {tmp_path / 'trace'}")}), "file")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("value", [{"_mgr": 1}, [1, 2], np.zeros(3)])
def test_a_pickle_that_is_no_table_is_named(value: object) -> None:
    with pytest.raises(DataFormatError, match="some/file is not a pickled pandas table"):
        read_frame(pickle.dumps(value), "some/file")

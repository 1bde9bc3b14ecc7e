"""Unpickling that can build arrays and containers, and nothing else.

A pickle is a program: an ordinary unpickler imports and calls whatever the file names. Here every name is
looked up in a short table of stand-ins instead, and a name that is not in it is refused. Not even numpy's
own functions are called by the pickle: an array arrives as its recorded state and is put together, with its
size checked, by us.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocnopt.lab.data.errors import DataFormatError, UnsafePickleError

_NUMBER = re.compile(r"[biuf][1248]")


class PickledType:
    """Stands for ``numpy.dtype``: element types that are numbers, or "O" (a list of objects)."""

    def __init__(self, kind: str | bytes, *flags: Any) -> None:
        self.kind = kind.decode("ascii") if isinstance(kind, bytes) else str(kind)
        self.big_endian = False
        if not (_NUMBER.fullmatch(self.kind) or self.kind in ("O", "O8")):
            raise UnsafePickleError(f"a pickled array has the element type {self.kind!r}; only numbers are read")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.big_endian = state[1] in (">", b">")

    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.kind).newbyteorder(">" if self.big_endian else "<")


class PickledArray:
    """Stands for an array: ``array`` for numbers, ``items`` for objects (in reading order)."""

    def __init__(self, *args: Any) -> None:
        self.array: NDArray[Any] | None = None
        self.items: list[Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, fortran, content = state
        self.fill(content, kind, shape, "F" if fortran else "C")

    def fill(self, content: Any, kind: PickledType, shape: tuple[int, ...], order: str) -> None:
        if isinstance(content, list):
            self.items = content
            return
        raw = content.encode("latin1") if isinstance(content, str) else bytes(content)
        dtype = kind.dtype()
        if dtype.hasobject or len(raw) != math.prod(shape) * dtype.itemsize:
            raise DataFormatError(f"a pickled array of shape {shape} does not have the bytes it needs")
        flat = np.frombuffer(raw, dtype)
        self.array = flat.reshape(shape, order="F" if order == "F" else "C").astype(dtype.newbyteorder("="))


def _from_buffer(content: Any, kind: PickledType, shape: tuple[int, ...], order: str) -> PickledArray:
    """How pickle protocol 5 writes an array."""
    array = PickledArray()
    array.fill(content, kind, shape, order)
    return array


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in old pickle protocols; no other codec is needed."""
    if encoding != "latin1":
        raise UnsafePickleError(f"a pickle asks for the codec {encoding!r}; only 'latin1' is allowed")
    return text.encode("latin1")


STAND_INS: Mapping[tuple[str, str], Any] = {
    ("numpy", "ndarray"): PickledArray,
    ("numpy", "dtype"): PickledType,
    ("_codecs", "encode"): _latin1,
    # numpy 2 moved its functions from numpy.core to numpy._core.
    **{(f"numpy.{core}.multiarray", "_reconstruct"): PickledArray for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
}


class RestrictedUnpickler(pickle.Unpickler):
    """Finds the stand-ins and nothing else. ``encoding`` says what the strings of Python 2 become."""

    def __init__(self, content: bytes, encoding: str = "bytes") -> None:
        super().__init__(io.BytesIO(content), encoding=encoding)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return STAND_INS[module, name]
        except KeyError:
            raise UnsafePickleError(f"a pickle asks for {module}.{name}, which data never needs") from None

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafePickleError("a pickle refers to an object outside itself, which data never does")


def read_pickle(
    content: bytes,
    origin: Path | str,
    unpickler: type[RestrictedUnpickler] = RestrictedUnpickler,
    encoding: str = "bytes",
) -> Any:
    """Containers, numbers, strings and stand-ins; errors name the file."""
    try:
        return unpickler(content, encoding=encoding).load()
    except UnsafePickleError as error:
        raise UnsafePickleError(f"{origin} was refused: {error}.") from error
    except Exception as error:  # a broken pickle can raise nearly anything
        raise DataFormatError(f"{origin} is not a readable pickle ({error}).") from error

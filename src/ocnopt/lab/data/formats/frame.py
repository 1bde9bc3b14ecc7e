"""A table that pandas has pickled, read without pandas.

The published Gas data is such a file, written by a pandas of 2017. Every name of pandas in the pickle
becomes an inert record of the arguments and the state that it was given, from which the columns are picked
out. So no pandas code runs, whatever the file says, and no particular pandas version is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ocnopt.lab.data.errors import DataFormatError
from ocnopt.lab.data.formats.pickles import PickledArray, RestrictedUnpickler, read_pickle


class _Record:
    """Stands for any class or function of pandas: remembers what it was called with."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Record:
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _FrameUnpickler(RestrictedUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "pandas":
            return type(name, (_Record,), {})
        if module in ("builtins", "__builtin__") and name == "slice":
            return slice
        return super().find_class(module, name)


def read_frame(content: bytes, origin: Path | str) -> dict[str, NDArray[np.float64]]:
    """The numeric columns of a pickled ``pandas.DataFrame``, by name, in their order."""
    frame = read_pickle(content, origin, _FrameUnpickler, encoding="latin1")
    try:
        axes, blocks = _manager(frame)
        names = _names(axes[0])
        columns: dict[int, NDArray[np.float64]] = {}
        for values, place in blocks:
            columns.update(zip(_numbers(place, len(names)), np.asarray(values.array, np.float64), strict=True))
        return {name: columns[number] for number, name in enumerate(names)}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DataFormatError(
            f"{origin} is not a pickled pandas table of numbers in a layout that is known here ({error!r})."
        ) from error


def _manager(frame: _Record) -> tuple[list[_Record], list[tuple[PickledArray, Any]]]:
    """The axes, and the blocks of values with the columns that they hold."""
    state = frame.state
    manager: _Record = state["_mgr"] if "_mgr" in state else state["_data"]
    if isinstance(manager.state, tuple):  # pandas < 1.3: a state tuple, its last entry the readable one
        layout = manager.state[3]["0.14.1"]
        return layout["axes"], [(block["values"], block["mgr_locs"]) for block in layout["blocks"]]
    blocks, axes = manager.args[:2]  # since then: the arguments of the constructor
    return axes, [(block.args[0], block.args[1]) for block in blocks]


def _names(axis: _Record) -> list[str]:
    """The labels of an index, pickled as ``_new_Index(class, {"data": labels, …})``."""
    labels: PickledArray = axis.args[1]["data"]
    if labels.items is None:
        raise ValueError("the columns have no names")
    return [str(label) for label in labels.items]


def _numbers(place: Any, count: int) -> list[int]:
    if isinstance(place, slice):
        return list(range(count))[place]
    return [int(number) for number in place.array]

"""ARFF, in the two ways the UEA archive uses it: one file per dimension, or one relational attribute."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ocnopt.lab.data.errors import DataFormatError
from ocnopt.lab.data.formats.series import SeriesFile, decode, parse_numbers, stack_channels

_NOMINAL = re.compile(r"^@attribute\s+\S+\s*\{(?P<values>.*)\}\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class _Table:
    relational: bool
    classes: tuple[str, ...]
    rows: list[tuple[int, str]]  # line number and text


def parse_relational(content: bytes, origin: str) -> SeriesFile:
    """One file with all dimensions, separated by a literal ``\\n``: ``'1,2,3\\n4,5,6',label``."""
    table = _parse_table(content, origin)
    if not table.relational:
        raise DataFormatError(f"{origin} has no relational attribute: it is not a whole multivariate problem.")
    cases: list[NDArray[np.float64]] = []
    labels: list[str] = []
    for number, row in table.rows:
        where = f"{origin}, line {number}"
        quote, end = row[0], row.rfind(row[0])
        if quote not in "'\"" or end == 0:
            raise DataFormatError(f"{where}: expected a quoted series.")
        cases.append(_series(row[1:end].split("\\n"), where))
        labels.append(_label(row[end + 1 :].lstrip(" ,"), table.classes, where))
    return SeriesFile(cases, labels, table.classes)


def parse_dimensions(contents: Sequence[bytes], origins: Sequence[str]) -> SeriesFile:
    """One file per dimension, each with the values of all cases and the label in the last column."""
    channels: list[list[NDArray[np.float64]]] = []
    labels: list[str] = []
    classes: tuple[str, ...] = ()
    for content, origin in zip(contents, origins, strict=True):
        table = _parse_table(content, origin)
        values, own_labels = [], []
        for number, row in table.rows:
            where = f"{origin}, line {number}"
            numbers, _, label = row.rpartition(",")
            values.append(_series([numbers], where)[0])
            own_labels.append(_label(label, table.classes, where))
        if channels and (own_labels != labels or table.classes != classes):
            raise DataFormatError(f"{origin} has other cases or labels than {origins[0]}.")
        channels.append(values)
        labels, classes = own_labels, table.classes
    cases = [stack_channels(list(case)) for case in zip(*channels, strict=True)]
    return SeriesFile(cases, labels, classes)


def _parse_table(content: bytes, origin: str) -> _Table:
    relational, in_data = False, False
    classes: tuple[str, ...] = ()
    rows: list[tuple[int, str]] = []
    for number, raw in enumerate(decode(content).splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("%"):
            continue
        if in_data:
            if line.startswith("{"):
                raise DataFormatError(f"{origin}, line {number}: sparse ARFF rows are not supported.")
            rows.append((number, line))
            continue
        lowered = line.lower()
        in_data = lowered.startswith("@data")
        relational |= lowered.startswith("@attribute") and lowered.endswith(" relational")
        if nominal := _NOMINAL.match(line):
            classes = tuple(_unquoted(value) for value in nominal["values"].split(","))
    if not classes:
        raise DataFormatError(f"{origin} has no nominal class attribute such as '@attribute target {{1,2}}'.")
    if not rows:
        raise DataFormatError(f"{origin} holds no series: there is nothing after '@data'.")
    return _Table(relational, classes, rows)


def _series(channels: list[str], where: str) -> NDArray[np.float64]:
    try:
        return stack_channels([parse_numbers(channel) for channel in channels])
    except ValueError as error:
        raise DataFormatError(f"{where}: {error}.") from error


def _label(text: str, classes: tuple[str, ...], where: str) -> str:
    label = _unquoted(text)
    if label not in classes:
        raise DataFormatError(f"{where}: the label {label!r} is not among the declared classes.")
    return label


def _unquoted(text: str) -> str:
    return text.strip().strip("'\"")

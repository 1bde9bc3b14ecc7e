"""The ``.ts`` format of the UEA archive: ``@`` headers, then one line per case, ``dimension:…:label``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ocnopt.lab.data.errors import DataFormatError
from ocnopt.lab.data.formats.series import SeriesFile, decode, parse_numbers, stack_channels


def parse_ts(content: bytes, origin: str) -> SeriesFile:
    """Read a classification problem. Header names count in any case; series may differ in length."""
    header: dict[str, list[str]] = {}
    cases: list[NDArray[np.float64]] = []
    labels: list[str] = []
    in_data = False
    for number, raw in enumerate(decode(content).splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith(("#", "%")):
            continue
        where = f"{origin}, line {number}"
        if in_data:
            case, label = _parse_case(line, header, where)
            cases.append(case)
            labels.append(label)
        elif line.startswith("@"):
            key, *values = line[1:].split()
            header[key.lower()] = values
            in_data = key.lower() == "data"
            if in_data:
                _check_header(header, origin)
        else:
            raise DataFormatError(f"{where}: expected a line that begins with '@' before '@data'.")
    if not cases:
        raise DataFormatError(f"{origin} holds no series: there is nothing after '@data'.")
    return SeriesFile(cases, labels, _classes(header, labels, origin))


def _check_header(header: dict[str, list[str]], origin: str) -> None:
    if _is_true(header, "timestamps"):
        raise DataFormatError(f"{origin}: series with time stamps are not supported ('@timeStamps true').")
    if not _is_true(header, "classlabel"):
        raise DataFormatError(f"{origin} is no classification problem: '@classLabel true' is missing.")


def _parse_case(line: str, header: dict[str, list[str]], where: str) -> tuple[NDArray[np.float64], str]:
    *channels, label = line.split(":")
    expected = header.get("dimensions") or header.get("dimension")
    if not channels or (expected and len(channels) != int(expected[0])):
        raise DataFormatError(
            f"{where}: {len(channels)} dimensions and a label, the header says {expected or 'at least 1'}."
        )
    try:
        return stack_channels([parse_numbers(channel) for channel in channels]), label.strip()
    except ValueError as error:
        raise DataFormatError(f"{where}: {error}.") from error


def _classes(header: dict[str, list[str]], labels: list[str], origin: str) -> tuple[str, ...]:
    listed = tuple(header["classlabel"][1:])
    unknown = sorted(set(labels) - set(listed))
    if listed and unknown:
        raise DataFormatError(f"{origin}: the label {unknown[0]!r} is not among those of '@classLabel'.")
    return listed or tuple(unknown)


def _is_true(header: dict[str, list[str]], key: str) -> bool:
    return header.get(key, ["false"])[0].lower() == "true"

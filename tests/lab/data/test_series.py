"""Time series in ``.ts`` and ``.arff``, and what a dataset makes of them."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.lab.data import writers

from ocnopt.lab.data import DataFormatError, Dataset, load
from ocnopt.lab.data.formats.arff import parse_dimensions, parse_relational
from ocnopt.lab.data.formats.series import length_of
from ocnopt.lab.data.formats.ts import parse_ts

NAN = float("nan")
NAME = "CharacterTrajectories"
TRAIN = ["1,2,3:10,20,30:up", "4,5:40,50:down"]
TEST = ["6:60:down", "7,8,9,10:70,80,90,100:up"]


def same(case: np.ndarray, expected: list[list[float]]) -> bool:
    return np.array_equal(case, np.array(expected), equal_nan=True)


# ---- .ts


def test_series_of_different_lengths_and_labels_in_the_order_of_the_header() -> None:
    file = parse_ts(writers.ts_text(TRAIN), "toy")
    assert same(file.cases[0], [[1, 2, 3], [10, 20, 30]])
    assert same(file.cases[1], [[4, 5], [40, 50]])
    assert (file.labels, file.classes) == (["up", "down"], ("up", "down"))


def test_missing_values_become_nan_wherever_they_are() -> None:
    file = parse_ts(writers.ts_text(["?,2, ? :1,?,3:up", "NaN,1:2,2:down"]), "toy")
    assert same(file.cases[0], [[NAN, 2, NAN], [1, NAN, 3]])
    assert same(file.cases[1], [[NAN, 1], [2, 2]])


def test_a_dimension_that_is_shorter_or_empty_is_missing_at_its_end() -> None:
    file = parse_ts(writers.ts_text(["1,2,3:5:up", ":1,2:down"]), "toy")
    assert same(file.cases[0], [[1, 2, 3], [5, NAN, NAN]])
    assert same(file.cases[1], [[NAN, NAN], [1, 2]])


@pytest.mark.parametrize(
    "header",
    [
        "@PROBLEMNAME toy\n@TimeStamps FALSE\n@ClassLabel True up down\n@DATA\n",
        "\ufeff@problemname toy\n\n  @classlabel\ttrue\tup\tdown \n@data\n".replace("\ufeff", "\xef\xbb\xbf"),
        "%comment\n@univariate true\n@dimension 2\n@missing true\n@classLabel true up down\n@data\n",
        "@seriesLength 3\r\n@equalLength true\r\n@classLabel true up down\r\n@data\r\n",
    ],
)
def test_header_variants(header: str) -> None:
    file = parse_ts(writers.ts_text(TRAIN, header), "toy")
    assert file.classes == ("up", "down")
    assert len(file.cases) == 2


def test_a_header_that_lists_no_classes_gets_them_from_the_labels() -> None:
    file = parse_ts(writers.ts_text(["1:b", "2:a", "3:b"], "@classLabel true\n@data\n"), "toy")
    assert file.classes == ("a", "b")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (writers.ts_text(["1,2:up"]), r"line 10: 1 dimensions and a label, the header says \['2'\]"),
        (writers.ts_text(["1,2:3,4:5,6:up"]), "line 10: 3 dimensions"),
        (writers.ts_text(["1,2,3"], "@classLabel true up\n@data\n"), "line 3: 0 dimensions"),
        (writers.ts_text(["1,x:3,4:up"]), "line 10: could not convert string to float"),
        (writers.ts_text(["1,,2:3,4:up"]), "line 10: could not convert string to float"),
        (writers.ts_text(["1,2:3,4:left"]), "the label 'left' is not among those of '@classLabel'"),
        (writers.ts_text([]), "holds no series"),
        (b"", "holds no series"),
        (b"1,2:3,4:up\n", "line 1: expected a line that begins with '@'"),
        (writers.ts_text(TRAIN, "@timeStamps true\n@classLabel true up down\n@data\n"), "time stamps"),
        (writers.ts_text(TRAIN, "@targetLabel true\n@data\n"), "no classification problem"),
        (writers.ts_text(TRAIN, "@classLabel false\n@data\n"), "no classification problem"),
    ],
)
def test_a_bad_ts_file_is_named(content: bytes, message: str) -> None:
    with pytest.raises(DataFormatError, match=message) as caught:
        parse_ts(content, "toy.ts")
    assert "toy.ts" in str(caught.value)


# ---- .arff


def test_one_arff_file_per_dimension() -> None:
    first = writers.arff_dimension(["1,2,3,up", "4,5,?,down"], 3)
    second = writers.arff_dimension(["10,?,30, 'up'", '40,50,?,"down"'], 3)
    file = parse_dimensions([first, second], ["d1", "d2"])
    assert same(file.cases[0], [[1, 2, 3], [10, NAN, 30]])
    assert same(file.cases[1], [[4, 5, NAN], [40, 50, NAN]])
    assert (file.labels, file.classes) == (["up", "down"], ("up", "down"))
    assert [length_of(case) for case in file.cases] == [3, 2]


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_relational_arff_file(quote: str) -> None:
    rows = [f"{quote}1,2,3\\n10,?,30{quote},up", f"{quote}4,5,?\\n40,50,?{quote}, down"]
    file = parse_relational(writers.arff_relational(rows, 3, "'up', 'down'"), "toy")
    assert same(file.cases[0], [[1, 2, 3], [10, NAN, 30]])
    assert same(file.cases[1], [[4, 5, NAN], [40, 50, NAN]])
    assert (file.labels, file.classes) == (["up", "down"], ("up", "down"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (writers.arff_dimension(["1,up"], 1), "no relational attribute"),
        (writers.arff_relational(["1,2,up"], 2), "expected a quoted series"),
        (writers.arff_relational(["'1,2"], 2), "expected a quoted series"),
        (writers.arff_relational(["'1,2\\n3,4',left"], 2), "label 'left' is not among the declared classes"),
        (writers.arff_relational(["'1,b\\n3,4',up"], 2), "line 9: could not convert"),
        (writers.arff_relational([], 2), "holds no series"),
        (writers.arff_relational(["{0 1}"], 2), "line 9: sparse ARFF rows"),
        (b"@relation x\n@attribute a numeric\n@data\n1\n", "no nominal class attribute"),
    ],
)
def test_a_bad_arff_file_is_named(content: bytes, message: str) -> None:
    with pytest.raises(DataFormatError, match=message) as caught:
        parse_relational(content, "toy.arff")
    assert "toy.arff" in str(caught.value)


@pytest.mark.parametrize("second", [["10,up", "20,up"], ["10,up"]])
def test_dimensions_must_have_the_same_cases(second: list[str]) -> None:
    contents = [writers.arff_dimension(rows, 1) for rows in (["1,up", "2,down"], second)]
    with pytest.raises(DataFormatError, match="d2 has other cases or labels than d1"):
        parse_dimensions(contents, ["d1", "d2"])


# ---- the dataset, from every form in which the archive is handed on


def write_ts(folder: Path) -> None:
    (folder / f"{NAME}_TRAIN.ts").write_bytes(writers.ts_text(TRAIN))
    (folder / f"{NAME}_TEST.ts").write_bytes(writers.ts_text(TEST))


def write_ts_gz(folder: Path) -> None:
    (folder / f"{NAME}_TRAIN.ts.gz").write_bytes(gzip.compress(writers.ts_text(TRAIN)))
    (folder / f"{NAME}_TEST.ts.gz").write_bytes(gzip.compress(writers.ts_text(TEST)))


def write_zip(folder: Path) -> None:
    with zipfile.ZipFile(folder / f"{NAME}.zip", "w") as archive:
        archive.writestr(f"{NAME}_TRAIN.ts", writers.ts_text(TRAIN))
        archive.writestr(f"{NAME}_TEST.ts", writers.ts_text(TEST))
        archive.writestr(f"{NAME}Dimension1_TRAIN.arff", b"not read, because the .ts files are there")


def dimension_files() -> dict[str, bytes]:
    files = {}
    for part, rows in (("TRAIN", TRAIN), ("TEST", TEST)):
        for number in (1, 2):
            cells = [[*row.split(":")[number - 1].split(","), *"????"][:4] for row in rows]
            lines = [",".join([*cell, row.split(":")[2]]) for cell, row in zip(cells, rows, strict=True)]
            files[f"{NAME}Dimension{number}_{part}.arff"] = writers.arff_dimension(lines, 4)
    return files


def write_dimensions(folder: Path) -> None:
    for name, content in dimension_files().items():
        (folder / name).write_bytes(content)


def write_dimensions_tar(folder: Path) -> None:
    members = {f"{NAME}/{name}": content for name, content in dimension_files().items()}
    writers.write_tar(folder / f"{NAME}_arff.tar.gz", members)


def write_relational(folder: Path) -> None:
    for part, rows in (("TRAIN", TRAIN), ("TEST", TEST)):
        lines = []
        for row in rows:
            x, y, label = row.split(":")
            lines.append(f"'{x}\\n{y}',{label}")
        (folder / f"{NAME}_{part}.arff").write_bytes(writers.arff_relational(lines, 4))


FORMS = [write_ts, write_ts_gz, write_zip, write_dimensions, write_dimensions_tar, write_relational]


def load_toy(folder: Path, write: Callable[[Path], None]) -> Dataset:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder)
    return load(NAME, folder)


@pytest.mark.parametrize("write", FORMS)
def test_all_forms_give_the_same_padded_and_standardised_series(tmp_path: Path, write: Callable[[Path], None]) -> None:
    data = load_toy(tmp_path, write)
    assert (data.input_shape, data.classes, data.subset) == ((4, 2), ("up", "down"), True)
    assert data.train.y.tolist() == [0, 1]
    assert data.test.y.tolist() == [1, 0]
    assert data.train.lengths is not None
    assert data.train.mask is not None
    assert data.test.mask is not None
    assert data.train.lengths.tolist() == [3, 2]
    assert data.train.mask[:, :, 0].tolist() == [[True] * 3 + [False], [True] * 2 + [False] * 2]
    # the values 1 to 5 have mean 3 and deviation sqrt(2); the second channel is ten times the first
    root = 2**0.5
    first = [[-2 / root, -1 / root, 0, 0], [1 / root, 2 / root, 0, 0]]
    torch.testing.assert_close(data.train.x[:, :, 0], torch.tensor(first))
    torch.testing.assert_close(data.train.x[:, :, 1], torch.tensor(first))
    torch.testing.assert_close(data.test.x[1, :, 0], torch.tensor([4.0, 5, 6, 7]) / root)
    assert (data.test.x[~data.test.mask] == 0).all()


def test_missing_values_are_0_and_masked_and_do_not_count_in_the_mean(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / f"{NAME}_TRAIN.ts").write_bytes(writers.ts_text(["1,?,3:7,7,7:up"]))
        (folder / f"{NAME}_TEST.ts").write_bytes(writers.ts_text(["?,2,?:7,8,?:down"]))

    data = load_toy(tmp_path, write)
    assert data.train.mask is not None
    assert data.test.lengths is not None
    assert data.train.mask[0, :, 0].tolist() == [True, False, True]
    assert data.train.x[0, :, 0].tolist() == [-1, 0, 1]
    assert data.train.x[0, :, 1].tolist() == [0, 0, 0]  # a constant channel
    assert data.test.x[0].tolist() == [[0, 0], [0, 1], [0, 0]]
    assert data.test.lengths.tolist() == [2]  # the last step has no value at all


def write_parts(train: bytes, test: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / f"{NAME}_TRAIN.ts").write_bytes(train)
        (folder / f"{NAME}_TEST.ts").write_bytes(test)

    return write


OTHER_CLASSES = writers.TS_HEADER.replace("up down", "up left")
ONE_DIMENSION = writers.TS_HEADER.replace("@dimensions 2", "@dimensions 1")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (write_parts(writers.ts_text(TRAIN), writers.ts_text(["1:1:up"], OTHER_CLASSES)), "differ in their classes"),
        (write_parts(writers.ts_text(TRAIN), writers.ts_text(["1:up"], ONE_DIMENSION)), "or dimensions"),
        (write_parts(writers.ts_text(["?,?:?,?:up"]), writers.ts_text(TEST)), "series 0 has no values at all"),
    ],
)
def test_parts_that_do_not_fit_together(tmp_path: Path, write: Callable[[Path], None], message: str) -> None:
    with pytest.raises(DataFormatError, match=message):
        load_toy(tmp_path, write)


def test_a_dimension_that_is_missing_is_noticed(tmp_path: Path) -> None:
    write_dimensions(tmp_path)
    (tmp_path / f"{NAME}Dimension2_TRAIN.arff").rename(tmp_path / f"{NAME}Dimension3_TRAIN.arff")
    with pytest.raises(DataFormatError, match=r"a dimension is missing; only .*Dimension1_TRAIN"):
        load(NAME, tmp_path)


def test_an_archive_without_series_and_a_broken_one(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / f"{NAME}.zip", "w") as archive:
        archive.writestr("readme.txt", "nothing")
    with pytest.raises(DataFormatError, match="holds no train series of CharacterTrajectories"):
        load(NAME, tmp_path)
    write_zip(tmp_path)
    content = bytearray((tmp_path / f"{NAME}.zip").read_bytes())
    content[content.index(b"1,2,3") + 1] ^= 1  # a stored member whose sum no longer fits
    (tmp_path / f"{NAME}.zip").write_bytes(content)
    with pytest.raises(DataFormatError, match="is damaged or cut short"):
        load(NAME, tmp_path)

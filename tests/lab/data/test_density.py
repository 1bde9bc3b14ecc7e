"""Gas and Miniboone, with the cleaning of their authors redone here by other means."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from tests.lab.data import writers

from ocnopt.lab.data import DataFormatError, Dataset, load
from ocnopt.lab.data.readers.density import drop_correlated, split_in_order

NAMES = ["Time", "Meth", "Eth", *(f"sensor{n}" for n in range(1, 17))]


def gas_table(rows: int = 400) -> np.ndarray:
    """19 columns; sensors 9 to 16 are sensors 1 to 8 with a little noise."""
    rng = np.random.default_rng(1)
    head = np.column_stack((np.arange(rows), rng.normal(size=(rows, 2))))
    sensors = 5 + 3 * rng.normal(size=(rows, 8))
    return np.concatenate((head, sensors, sensors + 0.01 * rng.normal(size=(rows, 8))), axis=1)


def text(table: np.ndarray) -> bytes:
    lines = [" ".join(f"{value:.6f}" for value in row) for row in table]
    return "\n".join(["Time (seconds), CO conc (ppm), sensor readings", *lines, ""]).encode()


def parts(data: Dataset) -> np.ndarray:
    assert data.validation is not None
    return np.concatenate([part.x.numpy() for part in (data.train, data.validation, data.test)])


def test_of_two_alike_columns_the_first_one_goes() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 500))
    table = np.column_stack((a, b, a + 0.001 * b, -a, b + 0.5 * a))
    # column 0 is like column 2, and goes; the opposite of a column is not "alike"
    assert np.array_equal(drop_correlated(table), table[:, 1:])


def test_three_alike_columns_leave_the_last_one() -> None:
    a, b = np.random.default_rng(0).normal(size=(2, 500))
    table = np.column_stack((a, 2 * a, b, 3 * a + 1))
    assert np.array_equal(drop_correlated(table), table[:, 2:])
    assert np.array_equal(drop_correlated(table[:, :1]), table[:, :1])


def test_the_split_is_in_order_and_of_the_published_sizes() -> None:
    rows = np.arange(36488)[:, None].astype(float)
    train, validation, test = split_in_order(rows)
    assert [len(p) for p in (train, validation, test)] == [29556, 3284, 3648]
    assert np.array_equal(np.concatenate((train, validation, test)), rows)
    sizes = [len(p) for p in split_in_order(np.zeros((1052065, 1)))]
    assert sizes == [852174, 94685, 105206]
    with pytest.raises(DataFormatError, match="10 rows are too few"):
        split_in_order(rows[:10])


def test_gas_from_the_published_pickle(tmp_path: Path) -> None:
    table = gas_table()
    (tmp_path / "gas").mkdir()
    (tmp_path / "gas" / "ethylene_CO.pickle").write_bytes(writers.frame_of_2017(table, NAMES))
    data = load("Gas", tmp_path)
    kept = table[:, 11:]
    expected = (kept - kept.mean(0)) / (kept.var(0) * 400 / 399) ** 0.5
    np.testing.assert_allclose(parts(data), expected, atol=1e-6)
    assert data.validation is not None
    assert [len(p) for p in (data.train, data.validation, data.test)] == [324, 36, 40]
    assert (data.task, data.input_shape, data.classes) == ("density", (8,), ())
    assert data.train.y.unique().tolist() == [0]


def test_gas_from_the_whole_published_archive(tmp_path: Path) -> None:
    members = {
        "data/power/data.npy": b"something else",
        "data/gas/ethylene_CO.pickle": writers.frame_of_2017(gas_table(), NAMES),
    }
    writers.write_tar(tmp_path / "data.tar.gz", members)
    assert load("Gas", tmp_path).input_shape == (8,)
    with pytest.raises(DataFormatError, match=r"data\.tar\.gz does not hold the file"):
        load("Miniboone", tmp_path)


@pytest.mark.parametrize("zipped", [False, True])
def test_gas_from_the_text_of_uci_is_a_quarter_of_the_rows(tmp_path: Path, zipped: bool) -> None:
    table = gas_table()
    if zipped:
        name = "gas+sensor+array+under+dynamic+gas+mixtures.zip"
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("ethylene_methane.txt", b"other")
            archive.writestr("ethylene_CO.txt", text(table))
    else:
        (tmp_path / "ethylene_CO.txt").write_bytes(text(table))
    data = load("Gas", tmp_path)
    read = parts(data)
    assert read.shape == (100, 8)
    assert any("not the rows that FFJORD used" in note for note in data.notes)
    drawn = np.round(table, 6)[np.random.default_rng(0).permutation(400)[:100], 11:]
    np.testing.assert_allclose(read, (drawn - drawn.mean(0)) / drawn.std(0, ddof=1), atol=1e-5)


def with_nan() -> np.ndarray:
    table = gas_table()
    table[3, 5] = np.nan
    return table


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a text table with 19 columns"),
        (b"header\n", "is not a text table with 19 columns"),
        (b"header\n1 2 3\n", "is not a text table with 19 columns"),
        (text(gas_table())[:-30], "is not a text table with 19 columns"),
        (text(with_nan()), "must hold finite numbers only"),
    ],
)
def test_bad_gas_text_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "ethylene_CO.txt").write_bytes(content)
    with pytest.raises(DataFormatError, match=message) as caught:
        load("Gas", tmp_path)
    assert "ethylene_CO.txt" in str(caught.value)


def test_bad_gas_pickles_are_named(tmp_path: Path) -> None:
    table = gas_table()
    path = tmp_path / "ethylene_CO.pickle"
    path.write_bytes(writers.frame_of_2017(table, ["When", *NAMES[1:]]))
    with pytest.raises(DataFormatError, match="has no column 'Time'; it has When"):
        load("Gas", tmp_path)
    table[3, 5] = np.inf
    path.write_bytes(writers.frame_of_2017(table, NAMES))
    with pytest.raises(DataFormatError, match="finite numbers only"):
        load("Gas", tmp_path)


def miniboone_table(rows: int = 300) -> np.ndarray:
    return 7 + np.random.default_rng(2).normal(size=(rows, 43)) * np.arange(1, 44)


def test_miniboone_is_standardised_with_everything_but_the_test_rows(tmp_path: Path) -> None:
    table = miniboone_table()
    np.save(tmp_path / "data.npy", table)
    data = load("Miniboone", tmp_path)
    seen = table[:270]
    np.testing.assert_allclose(parts(data), (table - seen.mean(0)) / seen.std(0), atol=1e-5)
    assert data.validation is not None
    assert [len(p) for p in (data.train, data.validation, data.test)] == [243, 27, 30]
    assert data.notes == (
        "243 train, 27 validation, 30 test instead of the "
        "29,556 train, 3,284 validation, 3,648 test of the published set.",
    )


def test_miniboone_parts_on_another_scale_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    for name in ("data", "val", "test"):
        np.save(tmp_path / f"{name}.npy", miniboone_table())
    data = load("Miniboone", tmp_path)
    assert len(data.test) == 30
    assert data.notes[-1] == "val.npy and test.npy beside data.npy were left out: they may be on another scale."


def test_miniboone_in_three_standardised_parts_is_taken_as_it_is(tmp_path: Path) -> None:
    tables = {name: miniboone_table(rows) for name, rows in (("train", 30), ("val", 5), ("test", 6))}
    for name, table in tables.items():
        np.save(tmp_path / f"{name}.npy", table)
    data = load("Miniboone", tmp_path)
    np.testing.assert_allclose(parts(data), np.concatenate(list(tables.values())), rtol=1e-6)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.zeros((50, 42)), r"must be a table with 43 columns; its shape is \(50, 42\)"),
        (np.zeros(43), "must be a table with 43 columns"),
        (np.zeros((0, 43)), "must be a table with 43 columns"),
        (np.full((50, 43), np.nan), "finite numbers only"),
        (np.full((50, 43), "a"), "finite numbers only"),
        (np.full((50, 43), None), "not a readable .npy file"),
    ],
)
def test_bad_miniboone_tables_are_named(tmp_path: Path, table: np.ndarray, message: str) -> None:
    np.save(tmp_path / "data.npy", table, allow_pickle=True)
    with pytest.raises(DataFormatError, match=message):
        load("Miniboone", tmp_path)


def test_a_miniboone_file_that_is_cut_short(tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", miniboone_table())
    path = tmp_path / "data.npy"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataFormatError, match=r"not a readable \.npy file"):
        load("Miniboone", tmp_path)

"""Recipes: one per row of Table I with the grids of the paper, and some that are not in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.lab.small import small_table

from ocnopt.lab.recipes import find_recipe, list_recipes, parse_recipe, read_recipe
from ocnopt.lab.schema import ConfigError

# Table I and the table of curvatures, as printed: row, curvature, then SGDm, RMSprop, Adam, EKFAC, E-MSA, DDP, OCNOpt.
PAPER = """
fcn-wine           adaptive  94.35 98.10 98.13 94.60 93.56 98.00 98.18
fcn-digits         adaptive  95.36 94.33 94.98 95.24 94.87 91.68 95.13
fcn-mnist          adaptive  92.65 91.89 92.54 92.73 90.24 90.42 93.30
fcn-fmnist         adaptive  82.49 83.87 84.36 84.12 82.04 81.98 84.98
cnn-mnist          adaptive  97.94 98.05 98.04 98.02 96.48 n/a   98.09
cnn-svhn           kronecker 89.00 88.41 87.76 90.63 79.45 n/a   90.70
cnn-cifar10        kronecker 71.26 70.52 70.04 71.85 61.42 n/a   71.92
residual-mnist     kronecker 98.65 98.61 98.49 98.77 98.25 n/a   98.76
residual-svhn      kronecker 88.58 88.96 89.20 88.75 87.40 n/a   89.91
resnet18-cifar10   adaptive  82.94 83.75 85.66 85.65 75.60 n/a   85.85
resnet18-cifar100  kronecker 71.78 71.65 71.96 71.95 62.63 n/a   72.24
inception-mnist    identity  97.96 97.75 97.72 97.90 97.39 n/a   98.03
inception-svhn     kronecker 87.61 86.14 86.84 88.89 82.68 n/a   88.94
inception-cifar10  kronecker 76.66 74.38 75.38 77.54 70.17 n/a   77.72
"""
ROWS = {name: (curvature, accuracies) for name, curvature, *accuracies in map(str.split, PAPER.strip().splitlines())}
COLUMNS = ("sgdm", "rmsprop", "adam", "ekfac", "emsa", "ddp", "ocnopt")

SGD = (3e-3, 5e-3, 7e-3, 1e-2, 3e-2, 5e-2, 7e-2, 1e-1, 3e-1, 5e-1)
ADAM = (5e-4, 7e-4, 1e-3, 3e-3, 5e-3, 7e-3, 1e-2, 3e-2, 5e-2)
EKFAC = (3e-3, 5e-3, 7e-3, 1e-2, 3e-2, 5e-2, 7e-2, 1e-1, 3e-1)


def test_there_is_a_recipe_for_every_row() -> None:
    names = {path.stem for path in list_recipes()}
    assert {name for name in names if name.startswith("table1-")} == {f"table1-{row}" for row in ROWS}


@pytest.mark.parametrize("path", list_recipes(), ids=lambda path: path.stem)
def test_every_recipe_can_be_read(path: Path) -> None:
    assert read_recipe(path).grids


@pytest.mark.parametrize("row", ROWS)
def test_a_recipe_says_what_the_paper_says(row: str) -> None:
    recipe = read_recipe(f"table1-{row}")
    curvature, accuracies = ROWS[row]
    network, dataset = row.split("-")
    assert (recipe.run.network.name, recipe.run.data.name) == (network, dataset.upper())
    assert recipe.run.data.batch_size in ((8, 16, 32) if network == "fcn" else (128,))
    given = zip(COLUMNS, accuracies, strict=True)
    assert recipe.paper == {column: float(value) for column, value in given if value != "n/a"}
    assert ("ddp" in recipe.grids) == (network == "fcn")
    for key, rates in (("sgdm", SGD), ("rmsprop", ADAM), ("adam", ADAM), ("ekfac", EKFAC)):
        assert recipe.grids[key].choices == {"lr": rates, "weight_decay": (0.0, 1e-4, 1e-3)}
    assert recipe.grids["ocnopt"].choices["curvature"] == (curvature,)
    assert recipe.grids["ocnopt"].choices["feedback"] == ("nonlinear",)
    assert recipe.run.optimizer.options["curvature"] == curvature


def parsed(**more: Any) -> Any:
    return parse_recipe({**small_table(), **more})


def test_a_grid_is_every_combination() -> None:
    grids = {"slow": {"name": "sgdm", "lr": [0.1, 1], "momentum": 0.5, "weight_decay": [0.0, 1e-3]}}
    (grid,) = parsed(grids=grids).grids.values()
    points = [(p.lr, p.options["momentum"], p.options["weight_decay"]) for p in grid.points()]
    assert points == [(0.1, 0.5, 0.0), (0.1, 0.5, 1e-3), (1.0, 0.5, 0.0), (1.0, 0.5, 1e-3)]
    assert len(grid) == 4
    assert grid.label == "SGDm momentum=0.5"
    assert grid.at({"lr": 0.3}).lr == 0.3


def test_the_configuration_of_a_run_is_a_recipe_without_grids() -> None:
    recipe = parsed()
    assert (recipe.title, recipe.grids, recipe.paper) == ("WINE, fcn", {}, {})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"grids": {"lion": {"lr": [1.0]}}}, "grids.lion.name must be one of sgdm"),
        ({"grids": {"sgdm": 3}}, "grids.sgdm must be a table, got 3"),
        ({"grids": {"sgdm": {"rate": [1.0]}}}, "grids.sgdm.rate is not known"),
        ({"grids": {"sgdm": {"lr": []}}}, "grids.sgdm.lr must not be empty"),
        ({"grids": {"sgdm": {"lr": [0.1, "x"]}}}, "grids.sgdm.lr must be a number > 0, got 'x'"),
        ({"grids": {"ocnopt": {"gauss_newton": [1.0, -1.0]}}}, "grids.ocnopt.gauss_newton must be a number > 0"),
        ({"grids": {"sgdm": {}}, "paper": {"adam": 3.0}}, "paper.adam is not known"),
        ({"grids": {"sgdm": {}}, "paper": {"sgdm": 101}}, "paper.sgdm must be a number in [0, 100], got 101"),
        ({"paper": 3}, "paper must be a table, got 3"),
        ({"grid": {}}, "grid is not known: did you mean grids?"),
    ],
)
def test_what_is_wrong_in_a_recipe_is_named(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**more)
    assert str(caught.value).startswith(message)


def test_recipes_are_found_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    comes_along = find_recipe("table1-fcn-wine")
    assert comes_along.is_file()
    assert comes_along == find_recipe("table1-fcn-wine.toml") == find_recipe(comes_along)
    own = Path("table1-fcn-wine.toml")
    own.write_text("")
    assert find_recipe("table1-fcn-wine.toml") == own  # a file that is there wins
    with pytest.raises(ConfigError, match="nothing: there is no such file"):
        read_recipe("nothing")

"""The paper's numbers are written down twice, beside the experiments and in the recipes: they must agree."""

from pathlib import Path

import pytest

from ocnopt.lab.recipes import list_recipes, parse_recipe, read_recipe
from ocnopt.lab.reproduce import Bench
from ocnopt.lab.reproduce.paper import COLUMNS, TABLE1, Row
from ocnopt.lab.reproduce.table1 import QUICK, QUICK_ROWS, recipe_of


@pytest.mark.parametrize("row", TABLE1, ids=lambda row: row.name)
def test_recipe_of_a_row(row: Row) -> None:
    recipe = read_recipe(row.recipe)
    assert dict(recipe.paper) == row.accuracy
    assert (recipe.run.network.name, recipe.run.data.name) == (row.network, row.dataset)
    assert recipe.grids["ocnopt"].choices["curvature"] == (row.curvature,)
    assert set(row.accuracy) <= set(recipe.grids)


def test_every_recipe_of_the_table_is_a_row() -> None:
    assert {path.stem for path in list_recipes() if path.stem.startswith("table1-")} == {row.recipe for row in TABLE1}


@pytest.mark.parametrize("name", QUICK_ROWS)
def test_quick_recipe(name: str, tmp_path: Path) -> None:
    (row,) = (row for row in TABLE1 if row.name == name)
    recipe = parse_recipe(recipe_of(row, Bench(tmp_path)))
    left_out = set(QUICK[name].left_out)
    assert list(recipe.grids) == [key for key in COLUMNS if key in row.accuracy and key not in left_out]
    assert recipe.run.data.validation > 0
    assert recipe.run.network.options == {}  # the paper's network
    paper = read_recipe(row.recipe)
    for key in ("sgdm", "rmsprop", "adam", "ekfac"):  # the best rates of all rows lie inside the paper's grids or near
        ours, theirs = (r.grids[key].choices["lr"] for r in (recipe, paper))
        assert min(ours) <= min(theirs)
        assert set(ours) & set(theirs)

"""Which runs a sweep consists of."""

from dataclasses import asdict, dataclass, replace

import pytest
from tests.lab.sweep.recipes import TABLE, small_recipe

from ocnopt.lab.config import DataConfig
from ocnopt.lab.schema import ConfigError
from ocnopt.lab.sweep import points_of
from ocnopt.lab.sweep.points import Point


def test_points_are_the_product_of_the_choices_and_the_seeds() -> None:
    points = points_of(small_recipe(), seeds=[3, 4])
    assert len(points) == 2 * (3 * 2 + 2 * 2)
    assert len({p.key for p in points}) == len(points)
    assert {p.setting for p in points[:10]} == {p.setting for p in points[10:]}
    assert points[1].values == {"lr": 0.01, "weight_decay": 1e-3, "seed": 3}
    assert [p.config.training.seed for p in points] == [3] * 10 + [4] * 10


def test_key_depends_on_everything_that_decides_the_numbers() -> None:
    keys = {p.key for p in points_of(small_recipe())}
    longer = {p.key for p in points_of(small_recipe(training={"epochs": 3}))}
    wider = {**TABLE["grids"], "sgdm": {"lr": [0.01, 0.1, 0.3, 0.5], "weight_decay": [0.0, 1e-3]}}
    assert keys.isdisjoint(longer)
    assert keys < {p.key for p in points_of(small_recipe(grids=wider))}


def test_key_does_not_depend_on_what_is_left_at_its_default() -> None:
    @dataclass(frozen=True)
    class Grown(DataConfig):
        colour: str = "grey"

    (point, *_) = points_of(small_recipe())
    grown = Grown(**asdict(point.config.data))
    assert Point(point.grid, replace(point.config, data=grown)).key == point.key
    assert Point(point.grid, replace(point.config, data=replace(grown, colour="red"))).key != point.key
    assert Point(point.grid, replace(point.config, data=replace(grown, split_seed=1))).key != point.key


def test_settings_are_never_chosen_on_the_test_set() -> None:
    recipe = small_recipe(data={"name": "WINE"})
    assert {p.config.data.validation for p in points_of(recipe)} == {0.1}
    assert {p.config.data.validation for p in points_of(small_recipe())} == {0.2}


def test_some_of_the_grids() -> None:
    assert {p.grid.key for p in points_of(small_recipe(), grids=["plain"])} == {"plain"}
    with pytest.raises(ConfigError, match=r"grids\.adam is not in the recipe: it has sgdm, plain"):
        points_of(small_recipe(), grids=["adam"])
    with pytest.raises(ConfigError, match="grids must hold at least one table"):
        points_of(small_recipe(grids={}, paper={}))

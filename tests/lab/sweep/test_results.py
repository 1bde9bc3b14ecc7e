"""The best setting of a grid is chosen on the validation samples, over seeds."""

from pathlib import Path

import pytest
from tests.lab.sweep.recipes import PATIENT, small_recipe

from ocnopt.lab.runs import Record, RunFolder
from ocnopt.lab.sweep import Board, points_of, summarise, work

GRIDS = {"sgdm": {"lr": [0.1, 0.2]}}


def test_choice(tmp_path: Path) -> None:
    recipe = small_recipe(grids=GRIDS)
    points = points_of(recipe, seeds=[0, 1])
    board = Board(str(tmp_path / "sweep.db"), "choice", PATIENT)
    found = {(0.1, 0): (0.8, 0.9), (0.1, 1): (0.8, 0.8), (0.2, 0): (0.9, 0.6), (0.2, 1): (0.9, 0.7)}

    def look_up(run: RunFolder) -> Record:
        config = run.config()
        validation, test = found[config["optimizer"]["lr"], config["training"]["seed"]]
        run.metrics_path.write_text(f'{{"kind": "epoch", "validation_accuracy": {validation}}}\n')
        return {"test_accuracy": test, "train_loss": 1.0, "seconds": 2.0, "diverged": False}

    work(board, points, tmp_path, look_up, pulse=PATIENT)
    (line,) = summarise(recipe, board.survey(points))
    board.close()
    assert (line.done, line.failed, line.paper, line.label) == (4, 0, 94.35, "SGDm")
    assert line.best is not None
    assert line.best.options == {"lr": 0.2}
    assert line.best.validation == pytest.approx(90)
    assert line.best.test == pytest.approx(65)
    assert line.best.test_deviation == pytest.approx(50**0.5)

"""Search the grids of a recipe with any number of workers, on one machine or many.

The state of a sweep lives in an Optuna study: a SQLite file, or a PostgreSQL database that many machines share. Each
point of the grid is one trial, run once; workers may come, go, be killed and come back at any time.
"""

from ocnopt.lab.sweep.board import Board, Claim, Standing
from ocnopt.lab.sweep.launch import SweepError, SweepOptions, run_sweep
from ocnopt.lab.sweep.points import Point, points_of
from ocnopt.lab.sweep.results import Line, Setting, summarise
from ocnopt.lab.sweep.worker import work

__all__ = [
    "Board",
    "Claim",
    "Line",
    "Point",
    "Setting",
    "Standing",
    "SweepError",
    "SweepOptions",
    "points_of",
    "run_sweep",
    "summarise",
    "work",
]

"""Dense differential dynamic programming in float64: slow, readable beside the paper, engine-free."""

from ocnopt.reference.ddp import Solution, gauss_newton_step, grouped_cost, solve, stage, states

__all__ = ["Solution", "gauss_newton_step", "grouped_cost", "solve", "stage", "states"]

"""ocnopt: the Optimal Control Theoretic Neural Optimizer.

Training a network is an optimal control problem, and backpropagation is its dynamic programming to first order.
OCNOpt keeps the second order: each layer gets a feedback policy that adapts its update to what the layers before it
have just changed.
"""

from ocnopt.curvature import Curvature, Metric
from ocnopt.diagnostics import Diagnostics, LayerReport
from ocnopt.graphs import GraphedStep, graphed_step
from ocnopt.groups import Groups
from ocnopt.layers import Adapter, Call, Recompute, register
from ocnopt.optimizer import OCNOpt
from ocnopt.version import __version__ as __version__

__all__ = [
    "Adapter",
    "Call",
    "Curvature",
    "Diagnostics",
    "GraphedStep",
    "Groups",
    "LayerReport",
    "Metric",
    "OCNOpt",
    "Recompute",
    "graphed_step",
    "register",
]

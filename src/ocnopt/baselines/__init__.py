"""Optimizers that OCNOpt is compared with: EKFAC, E-MSA and vanilla DDP.

``EKFAC`` is used like any torch optimizer. ``EMSA`` and ``DDP`` solve a control problem per mini-batch and so
need the batch itself: they share :class:`BatchOptimizer`, whose ``step(inputs, target)`` replaces forward,
backward and step.
"""

from ocnopt.baselines.chain import BatchOptimizer
from ocnopt.baselines.ddp import DDP
from ocnopt.baselines.ekfac import EKFAC
from ocnopt.baselines.emsa import EMSA

__all__ = ["DDP", "EKFAC", "EMSA", "BatchOptimizer"]

"""The metric of each player: identity, adaptive or Kronecker (the paper's Table I), or one of your own."""

from ocnopt.curvature.adaptive import Adaptive
from ocnopt.curvature.base import Curvature, Metric
from ocnopt.curvature.identity import Identity
from ocnopt.curvature.kronecker import Kronecker

#: the curvatures that have a name
BY_NAME: dict[str, Curvature] = {c.name: c for c in (Identity(), Adaptive(), Kronecker())}

__all__ = ["BY_NAME", "Adaptive", "Curvature", "Identity", "Kronecker", "Metric"]

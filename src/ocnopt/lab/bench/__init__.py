"""Speed and memory of optimizers, measured side by side. ``measure(Settings(...))`` is the whole of it.

Beside the core it needs torchdiffeq, numpy and filelock: ``python -m ocnopt.lab.bench`` runs where the rest of the lab
is not installed. ``ocnopt bench`` is the same with tables for a terminal, and draws.
"""

from ocnopt.lab.bench.benchmark import Findings, Settings, measure

__all__ = ["Findings", "Settings", "measure"]

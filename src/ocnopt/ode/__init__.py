"""Neural ODEs: blocks that torchdiffeq solves, trained with second-order curvature along the solve."""

try:
    import torchdiffeq  # noqa: F401
except ImportError as error:
    raise ImportError("ocnopt.ode needs torchdiffeq: pip install 'ocnopt[ode]'") from error

from ocnopt.ode.block import NeuralODE
from ocnopt.ode.field import Evaluations
from ocnopt.ode.horizon import Horizon
from ocnopt.ode.solver import SolverError

__all__ = ["Evaluations", "Horizon", "NeuralODE", "SolverError"]

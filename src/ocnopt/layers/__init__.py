"""One adapter per kind of layer: how it turns inputs and output adjoints into gradients of groups of samples.

To teach the optimizer a layer of your own, write an :class:`Adapter` (only ``group_gradients`` is needed) and
:func:`register` it, or register :class:`Recompute`, which fits any module.
"""

# Imported for what they register.
from ocnopt.layers import attention, conv, embedding, linear, norm  # noqa: F401
from ocnopt.layers.base import Adapter, Call, KroneckerInputs
from ocnopt.layers.recompute import Recompute
from ocnopt.layers.registry import find, register

__all__ = ["Adapter", "Call", "KroneckerInputs", "Recompute", "find", "register"]

"""The kernels. Most run over all parameters of a shelf, in chunks; a table says where each parameter has its numbers.

They are written for float32 arithmetic, whatever the parameters are of. Nothing is added up in an order that could
change: the same numbers in give the same numbers out.
"""

from ocnopt.fused.kernels.acting import act, add_up, add_up_by_group, look, look_by_group
from ocnopt.fused.kernels.common import BLOCK, CHUNK, INTERPRETED, KINDS, LANES
from ocnopt.fused.kernels.layers import norm_backward
from ocnopt.fused.kernels.policy import lines
from ocnopt.fused.kernels.products import by_channel, change, dots, sums, total

__all__ = [
    "BLOCK",
    "CHUNK",
    "INTERPRETED",
    "KINDS",
    "LANES",
    "act",
    "add_up",
    "add_up_by_group",
    "by_channel",
    "change",
    "dots",
    "lines",
    "look",
    "look_by_group",
    "norm_backward",
    "sums",
    "total",
]

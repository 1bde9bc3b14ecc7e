"""Ways to the weight gradients of convolutions, and when each is the quickest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

from ocnopt.groups import Groups
from ocnopt.layers import outer


class Way(Enum):
    """How the weight gradients of groups of samples are found."""

    IN_TURN = "one convolution after another"
    FOLDED = "one convolution, with the groups of samples as groups of channels"
    WINDOWS = "one matrix product a group, of what the kernel sees, all at once"
    TAPS = "one matrix product a group and tap of the kernel, in a kernel of ours"


def way(device: str, groups: Groups, positions: int, weight: Sequence[int], blocks: int, strided: bool = False) -> Way:
    """The quickest, for so many ``positions`` in a sample and a weight of that shape.

    Measured on a CPU core (float32, 3×3 kernels, 8 to 64 channels, batch 64 and 128, r = 4 to B): where oneDNN has a
    kernel for the folded layout (channels of a block in eights, or depthwise), the weight is small and a group of so
    few positions that a call hardly pays for itself, folding is 1.5 to 4 times faster than taking the groups in
    turn; elsewhere it is up to 4 times slower. With one channel in a block it is mostly 1 to 12 times faster up to 2¹⁶
    outputs of a group, and at twice as many no longer, then half as fast, and depthwise a quarter (6 to 64 channels
    out, 8×8 to 28×28 pixels, r = 4 to B, one core and two). With two channels it depends, with three it is mostly
    slower. Windows and a batched matrix product are 2 to 6 times slower than the better of the two, except where the
    windows of a batch are few: with up to two for each channel they were 1 to 7 times faster (16 to 512 channels, 1×1
    to 4×4 pixels, batch 16 to 256, r = 1, 2 and 8), once 1.2 times slower. With all samples in one group a newer CPU
    was twice as fast without them at two for each channel, and 2 to 6 times slower at half of one.

    Elsewhere every call is a few launches. Measured on an H200 (r = 8, batch 128, the layers of ResNet18 on 32×32
    pixels and of a CNN on 28×28): windows are up to 5 times faster than folding where a batch has few positions, 2 to
    4 times where the kernel has a stride, and 1.2 to 2.4 times slower elsewhere.
    """
    if device == "cpu" and blocks == 1 and groups.batch * positions <= min(groups.rank, 2) * weight[0]:
        return Way.WINDOWS
    if groups.rank == 1:
        return Way.IN_TURN
    if device != "cpu":
        rows = groups.batch * positions
        quick = (strided or rows <= 4096) and rows * math.prod(weight[1:]) <= outer.PIECE
        return Way.WINDOWS if quick and blocks == 1 else Way.FOLDED
    channels, size = (weight[0] // blocks, weight[1]), math.prod(weight)
    if channels[1] == 1:
        outputs = weight[0] * groups.batch * positions
        return Way.FOLDED if size <= 2**16 and outputs <= 2**16 * groups.rank else Way.IN_TURN
    few = size <= 2**14 and size * groups.batch * positions <= 3e6 * groups.rank
    return Way.FOLDED if few and all(n % 8 == 0 for n in channels) else Way.IN_TURN


def suits_taps(groups: Groups, x: Sequence[int], h: Sequence[int]) -> bool:
    """Is :attr:`Way.TAPS` quicker than others, of an input and an adjoint of these shapes?

    Measured on a CPU core (1×1 to 5×5 kernels, strides 1 and 2, 3 to 512 channels, 2×2 to 56×56 pixels, batch 32 to
    256, r = 2 to B): up to 8×8 pixels, from 32 channels on and while a group's share of the larger tensor stays next to
    the core (half a mebibyte), it takes 0.2 to 0.9 of the time of the best other way. Beyond, it is soon slower, and
    ten times where channels are few.
    """
    share = max(math.prod(x), math.prod(h)) // groups.rank
    return groups.rank > 1 and math.prod(x[2:]) <= 64 and x[1] >= 32 and share <= 2**17

"""What layers are asked for."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["channels", "count"])
def norm_backward(
    x,
    h,
    mean,
    scale,
    weight,
    starts,
    into,
    columns,
    of_weight,
    of_bias,
    channels,
    positions,
    count,
    RANK: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All gradients of a batch norm of ``[batch, channels, positions]``, of which a program has ``CHANNELS``.

    ``mean`` and ``scale``: 1/σ, are those of the batch, and ``count`` the numbers that each is of. ``columns: [2, RANK,
    channels]``: Σ h ⊙ x̂ and Σ h of each group; ``of_weight``, ``of_bias``: of all. ``into``: ∂L/∂x.
    """
    first_channel = tl.program_id(0) * CHANNELS
    group, column = tl.arange(0, WIDE), tl.arange(0, CHANNELS * BLOCK)
    mine, place = first_channel + column // BLOCK, column % BLOCK
    first = tl.load(starts + group, mask=group < RANK, other=0)
    end = tl.load(starts + group + 1, mask=group < RANK, other=0)
    longest = tl.max(end - first)
    mu = tl.load(mean + mine, mask=mine < channels, other=0.0)
    products = tl.zeros([WIDE, ROWS, CHANNELS * BLOCK], tl.float32)
    sums = tl.zeros([WIDE, ROWS, CHANNELS * BLOCK], tl.float32)
    for i in range(0, longest, ROWS):
        sample = first[:, None] + i + tl.arange(0, ROWS)[None, :]
        there = sample < end[:, None]
        for j in range(0, positions, BLOCK):
            at = (sample[:, :, None] * channels + mine[None, None, :]) * positions + (j + place)[None, None, :]
            inside = there[:, :, None] & ((mine < channels) & (j + place < positions))[None, None, :]
            here = tl.load(h + at, mask=inside, other=0.0)
            products += here * (tl.load(x + at, mask=inside, other=0.0) - mu[None, None, :])
            sums += here
    channel = first_channel + tl.arange(0, CHANNELS)
    known = channel < channels
    sigma = tl.load(scale + channel, mask=known, other=0.0)
    by_group = tl.sum(tl.reshape(tl.sum(products, 1), [WIDE, CHANNELS, BLOCK]), 2) * sigma[None, :]
    plain = tl.sum(tl.reshape(tl.sum(sums, 1), [WIDE, CHANNELS, BLOCK]), 2)
    at_group = columns + group[:, None] * channels + channel[None, :]
    both = (group < RANK)[:, None] & known[None, :]
    tl.store(at_group, by_group, mask=both)
    tl.store(at_group + RANK * channels, plain, mask=both)
    product, total = tl.sum(by_group, 0), tl.sum(plain, 0)
    tl.store(of_weight + channel, product, mask=known)
    tl.store(of_bias + channel, total, mask=known)
    factor = sigma * tl.load(weight + channel, mask=known, other=0.0)
    factor = tl.reshape(tl.broadcast_to(factor[:, None], [CHANNELS, BLOCK]), [CHANNELS * BLOCK])
    slope = tl.reshape(tl.broadcast_to((sigma * product / count)[:, None], [CHANNELS, BLOCK]), [CHANNELS * BLOCK])
    shift = tl.reshape(tl.broadcast_to((total / count)[:, None], [CHANNELS, BLOCK]), [CHANNELS * BLOCK])
    for i in range(0, longest, ROWS):
        sample = first[:, None] + i + tl.arange(0, ROWS)[None, :]
        there = sample < end[:, None]
        for j in range(0, positions, BLOCK):
            at = (sample[:, :, None] * channels + mine[None, None, :]) * positions + (j + place)[None, None, :]
            inside = there[:, :, None] & ((mine < channels) & (j + place < positions))[None, None, :]
            here = tl.load(h + at, mask=inside, other=0.0)
            away = tl.load(x + at, mask=inside, other=0.0) - mu[None, None, :]
            found = factor[None, None, :] * (here - shift[None, None, :] - away * slope[None, None, :])
            tl.store(into + at, found, mask=inside)

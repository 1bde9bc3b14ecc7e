"""Inner products."""

import triton
import triton.language as tl

from ocnopt.fused.kernels.common import pointer


@triton.jit
def part_of(x, y, first, programs, numbers, BLOCK: tl.constexpr):
    """What one of the programs of a row adds up: every so many blocks of it, from the first on.

    Products alone and with others are the same to the last digit. The order in which :func:`tl.sum` adds follows from
    how numbers are spread over threads, and that from what is known of their alignment when a kernel is built: so of
    ``x`` and ``y`` nothing must be.
    """
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(first * BLOCK, numbers, programs * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < numbers
        here = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        sums += here * tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(sums)


@triton.jit(do_not_specialize=["width", "parts"], do_not_specialize_on_alignment=["x", "y", "partials"])
def change(
    x,
    y,
    before,
    group_of,
    scale,
    plus,
    partials,
    arrivals,
    result,
    width,
    parts,
    LESS: tl.constexpr,
    SCALED: tl.constexpr,
    SIGN: tl.constexpr,
    PLUS: tl.constexpr,
    RANK: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """⟨x_i, y_i⟩ of each row, of ``width`` numbers, less ``before``, added up by group of rows, and
    scaled. ``result: [2, RANK]``: the sums, and these and ``plus``. There are ``parts`` programs for each row; the last
    of all adds up.
    """
    i, programs = tl.program_id(0), tl.num_programs(0)
    begin = (i // parts).to(tl.int64) * width
    tl.store(partials + i, part_of(x + begin, y + begin, i % parts, parts, width, BLOCK))
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem="acq_rel") == programs - 1:
        group = tl.arange(0, WIDE)
        there = group < RANK
        found = tl.zeros([WIDE], tl.float32)
        for start in range(0, programs, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < programs
            part = tl.load(partials + at, mask=inside, other=0.0, volatile=True)
            if RANK == 1:
                found += tl.sum(part)
            else:
                row = at // parts
                if LESS:
                    part -= tl.load(before + row, mask=inside & (at % parts == 0), other=0.0)
                mine = tl.load(group_of + row, mask=inside, other=-1)
                found += tl.sum(tl.where(mine[None, :] == group[:, None], part[None, :], 0.0), 1)
        if LESS and RANK == 1:  # at last, so that nothing is left where nothing has changed
            found -= tl.load(before)
        found *= SIGN
        if SCALED:
            found *= tl.load(scale).to(tl.float32)
        tl.store(result + group, found, mask=there)
        if PLUS:
            found += tl.load(plus + group, mask=there, other=0.0)
        tl.store(result + RANK + group, found, mask=there)
        tl.store(arrivals, 0)  # for the next time


@triton.jit
def dots(
    addresses,
    shares,
    partials,
    pairs,
    X: tl.constexpr,
    Y: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Inner products of many pairs, or of rows of them. ``addresses: [2, pairs]``. ``shares: [programs, 5]``: the pair,
    the row's first number, which of the programs of the row it is, how many these are, and the numbers in the row. Each
    leaves its part of the sum, which is made of the same parts as that of a single product.
    """
    i = tl.program_id(0)
    which, offset = tl.load(shares + 5 * i), tl.load(shares + 5 * i + 1)
    first, programs, numbers = tl.load(shares + 5 * i + 2), tl.load(shares + 5 * i + 3), tl.load(shares + 5 * i + 4)
    x = pointer(addresses, which, X, False) + offset
    y = pointer(addresses + pairs, which, Y, False) + offset
    tl.store(partials + i, part_of(x, y, first, programs, numbers, BLOCK))


@triton.jit(do_not_specialize_on_alignment=["partials"])
def sums(partials, firsts, results, BLOCK: tl.constexpr):
    """Of the parts of each product: no more than a block."""
    i, at = tl.program_id(0), tl.arange(0, BLOCK)
    start, end = tl.load(firsts + i), tl.load(firsts + i + 1)
    tl.store(results + i, tl.sum(tl.load(partials + start + at, mask=start + at < end, other=0.0)))


@triton.jit(do_not_specialize=["positions"])
def by_channel(x, h, starts, result, positions, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Σ h ⊙ x and Σ h of one channel and one group of samples of ``[batch, channels, positions]``. ``result: [2,
    groups, channels]``.
    """
    channel, group, channels, groups = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    first, end = tl.load(starts + group), tl.load(starts + group + 1)
    products = tl.zeros([ROWS, BLOCK], tl.float32)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(first, end, ROWS):
        sample = start + tl.arange(0, ROWS)
        row = (sample * channels + channel) * positions
        for j in range(0, positions, BLOCK):
            at = j + tl.arange(0, BLOCK)
            inside = (sample < end)[:, None] & (at < positions)[None, :]
            here = tl.load(h + row[:, None] + at[None, :], mask=inside, other=0.0)
            products += here * tl.load(x + row[:, None] + at[None, :], mask=inside, other=0.0)
            sums += here
    place = result + group * channels + channel
    tl.store(place, tl.sum(products))
    tl.store(place + groups * channels, tl.sum(sums))


@triton.jit(do_not_specialize=["numbers"])
def total(columns, result, numbers, ALIGNED: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Σ over the first dimension of ``[RANK, numbers]``."""
    if ALIGNED:
        numbers = tl.multiple_of(numbers, 4)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    found = tl.zeros([BLOCK], tl.float32)
    for g in tl.static_range(RANK):
        found += tl.load(columns + g * numbers + at, mask=inside, other=0.0)
    tl.store(result + at, found, mask=inside)

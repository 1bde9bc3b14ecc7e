"""Over all parameters of a shelf, in chunks: looking at gradients, and acting."""

import triton
import triton.language as tl

from ocnopt.fused.kernels.common import located, pointer

#: the least positive number that is not denormal
_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _weight_of_average(clock, log_rate):
    """1 − μ^t, this step counted. In float64, where the difference loses no digits that matter."""
    t = tl.load(clock).to(tl.float64) + 1.0
    return (1.0 - tl.exp(t * log_rate)).to(tl.float32)


@triton.jit
def _diagonal(v, weight, eps):
    """√(v / weight) + ε; 0/0 is no step, and NaN goes on."""
    mean = v / weight
    return tl.sqrt(tl.where(mean < _TINY, _TINY, mean)) + eps


@triton.jit(do_not_specialize=["n", "total"])
def look(
    grads,
    others,
    chunks,
    decays,
    clock,
    partials,
    correction,
    n,
    total,
    cost,
    log_mu,
    keep,
    fresh,
    log_keep,
    eps,
    share,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    SIGN: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    CORRECTED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    AVERAGED: tl.constexpr,
    DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``partials: [4, chunks]``: g^T C^{-1} g, g^T C^{-1} ℓ, g^T γθ and g^T g of each chunk, with C as it is going to
    be in this step. ``correction``: 1 − μ^t, where momentum is an average.
    """
    i = tl.program_id(0)
    if MOMENTUM and AVERAGED:
        tl.store(correction, _weight_of_average(clock, log_mu), mask=i == 0)
    which, start, end = located(chunks, i, CHUNK)
    g_at = pointer(grads, which, GRAD, ALIGNED)
    theta_at = pointer(others, which, PARAM, ALIGNED)
    m_at = pointer(others + n, which, tl.float32, ALIGNED)
    v_at = pointer(others + 2 * n, which, tl.float32, ALIGNED)
    weight = 1.0
    if ADAPTIVE and CORRECTED:
        weight = _weight_of_average(clock, log_keep)
    gamma = 0.0
    if DECAY or DECOUPLED:
        gamma = tl.load(decays + which)
    K = tl.zeros([BLOCK], tl.float32)
    u = tl.zeros([BLOCK], tl.float32)
    free = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for j in range(0, CHUNK, BLOCK):
        at = start + j + tl.arange(0, BLOCK)
        inside = at < end
        g = SIGN * tl.load(g_at + at, mask=inside, other=0.0).to(tl.float32)
        decayed = tl.zeros([BLOCK], tl.float32)
        if DECAY or DECOUPLED:
            decayed = gamma * tl.load(theta_at + at, mask=inside, other=0.0).to(tl.float32)
        cost_here = tl.zeros([BLOCK], tl.float32)
        if MOMENTUM:
            cost_here = cost * tl.load(m_at + at, mask=inside, other=0.0)
        if DECAY:
            cost_here += decayed
        direction = g
        if ADAPTIVE:
            q = g
            if DECAY:
                q = g + share * decayed
            v = keep * tl.load(v_at + at, mask=inside, other=0.0) + fresh * q * q
            direction = g / _diagonal(v, weight, eps)
        K += g * direction
        u += cost_here * direction
        free += g * decayed if DECOUPLED else tl.zeros([BLOCK], tl.float32)
        squares += g * g
    tl.store(partials + i, tl.sum(K))
    tl.store(partials + total + i, tl.sum(u))
    tl.store(partials + 2 * total + i, tl.sum(free))
    tl.store(partials + 3 * total + i, tl.sum(squares))


@triton.jit(do_not_specialize=["total"])
def add_up(partials, firsts, rows, total, BLOCK: tl.constexpr):
    """``rows: [parameters, 4]``, the sums of each parameter's chunks."""
    which = tl.program_id(0)
    start, end = tl.load(firsts + which), tl.load(firsts + which + 1)
    column = tl.arange(0, 4)
    sums = tl.zeros([4, BLOCK], tl.float32)
    for j in range(start, end, BLOCK):
        at = j + tl.arange(0, BLOCK)
        sums += tl.load(partials + column[:, None] * total + at[None, :], mask=at[None, :] < end, other=0.0)
    tl.store(rows + 4 * which + column, tl.sum(sums, 1))


@triton.jit(do_not_specialize=["n"])
def look_by_group(
    grads,
    columns,
    others,
    chunks,
    decays,
    clock,
    fractions,
    partials,
    correction,
    n,
    cost,
    log_mu,
    keep,
    fresh,
    log_keep,
    eps,
    share,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    SIGN: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    CORRECTED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    AVERAGED: tl.constexpr,
    DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANK: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same with a gradient for each group of samples, ``columns: [RANK, numbers]`` of each parameter, which add up
    to the gradient: whatever it has beyond their sum is theirs by ``fractions``.

    ``partials: [chunks, RANK² + 2 RANK + 1]``: G^T C^{-1} G, G^T C^{-1} ℓ, G^T γθ, and the squares of all that is read.
    """
    i = tl.program_id(0)
    if MOMENTUM and AVERAGED:
        tl.store(correction, _weight_of_average(clock, log_mu), mask=i == 0)
    which, start, end = located(chunks, i, CHUNK)
    g_at = pointer(grads, which, GRAD, ALIGNED)
    columns_at = pointer(columns, which, tl.float32, ALIGNED)
    theta_at = pointer(others, which, PARAM, ALIGNED)
    m_at = pointer(others + n, which, tl.float32, ALIGNED)
    v_at = pointer(others + 2 * n, which, tl.float32, ALIGNED)
    weight = 1.0
    if ADAPTIVE and CORRECTED:
        weight = _weight_of_average(clock, log_keep)
    gamma = 0.0
    if DECAY or DECOUPLED:
        gamma = tl.load(decays + which)
    if ALIGNED:
        end = tl.multiple_of(end, 4)
    group = tl.arange(0, WIDE)
    there = group < RANK
    nu = tl.load(fractions + group, mask=there, other=0.0)
    K = tl.zeros([WIDE, WIDE, BLOCK], tl.float32)
    u = tl.zeros([WIDE, BLOCK], tl.float32)
    free = tl.zeros([WIDE, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for j in range(0, tl.minimum(end - start, CHUNK), BLOCK):
        at = start + j + tl.arange(0, BLOCK)
        inside = at < end
        g = SIGN * tl.load(g_at + at, mask=inside, other=0.0).to(tl.float32)
        G = tl.load(columns_at + group[:, None] * end + at[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        G = SIGN * G
        squares += g * g + tl.sum(G * G, 0)
        G += nu[:, None] * (g - tl.sum(G, 0))[None, :]
        decayed = tl.zeros([BLOCK], tl.float32)
        if DECAY or DECOUPLED:
            decayed = gamma * tl.load(theta_at + at, mask=inside, other=0.0).to(tl.float32)
        cost_here = tl.zeros([BLOCK], tl.float32)
        if MOMENTUM:
            cost_here = cost * tl.load(m_at + at, mask=inside, other=0.0)
        if DECAY:
            cost_here += decayed
        direction = G
        if ADAPTIVE:
            q = g
            if DECAY:
                q = g + share * decayed
            v = keep * tl.load(v_at + at, mask=inside, other=0.0) + fresh * q * q
            direction = G / _diagonal(v, weight, eps)[None, :]
        K += G[:, None, :] * direction[None, :, :]
        if MOMENTUM or DECAY:
            u += cost_here[None, :] * direction
        if DECOUPLED:
            free += decayed[None, :] * G
    row = partials + i * (RANK * RANK + 2 * RANK + 1)
    tl.store(row + group[:, None] * RANK + group[None, :], tl.sum(K, 2), mask=there[:, None] & there[None, :])
    row += RANK * RANK
    tl.store(row + group, tl.sum(u, 1), mask=there)
    tl.store(row + RANK + group, tl.sum(free, 1), mask=there)
    tl.store(row + 2 * RANK, tl.sum(squares))


@triton.jit
def add_up_by_group(partials, firsts, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """``rows: [parameters, WIDTH]``, the sums of each parameter's chunks, some columns in each program."""
    which, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start, end = tl.load(firsts + which), tl.load(firsts + which + 1)
    sums = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for j in range(start, end, BLOCK):
        at = j + tl.arange(0, BLOCK)
        inside = (at < end)[:, None] & (column < WIDTH)[None, :]
        sums += tl.load(partials + at[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
    tl.store(rows + WIDTH * which + column, tl.sum(sums, 0), mask=column < WIDTH)


@triton.jit
def _line(start, slope, s, LINE: tl.constexpr, CLAMP: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr):
    """w of each group: a number or a line in s, within bounds; ``WIDE``: how many there is room for."""
    group = tl.arange(0, WIDE)
    there = group < RANK
    w = tl.load(start + group, mask=there, other=0.0)
    if LINE:
        both = there[:, None] & there[None, :]
        slopes = tl.load(slope + group[:, None] * RANK + group[None, :], mask=both, other=0.0)
        w += tl.sum(slopes * tl.load(s + group, mask=there, other=0.0)[None, :], 1)
    w = tl.where(tl.abs(w) < float("inf"), w, 0.0)  # a kernel beyond all numbers: do not move
    if CLAMP:
        w = tl.minimum(tl.maximum(w, 0.0), 1.0)
    return w


@triton.jit(do_not_specialize=["n", "first"])
def act(
    grads,
    columns,
    others,
    chunks,
    decays,
    clock,
    fractions,
    ok,
    start_of_w,
    slope_of_w,
    s,
    taken,
    lr,
    n,
    first,
    mu,
    intake,
    players,
    log_mu,
    keep,
    fresh,
    log_keep,
    eps,
    share,
    GRAD: tl.constexpr,
    PARAM: tl.constexpr,
    SIGN: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    CORRECTED: tl.constexpr,
    MOMENTUM: tl.constexpr,
    AVERAGED: tl.constexpr,
    AHEAD: tl.constexpr,
    DECAY: tl.constexpr,
    DECOUPLED: tl.constexpr,
    LINE: tl.constexpr,
    CLAMP: tl.constexpr,
    RATE_ON_DEVICE: tl.constexpr,
    MOVE: tl.constexpr,
    CARRY: tl.constexpr,
    AGAIN: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANK: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """θ ← θ − φ M^{-1} (N G w + ℓ) if ``MOVE``; momentum and second moments go on if ``CARRY``.

    w is what the policy asks for. It is noted in ``taken``, where ``AGAIN`` finds it. ``columns``: see
    ``look_by_group``; where there is one group, nobody reads them. There is a program for each block of a chunk.
    """
    i = first + tl.program_id(0)
    which, start, end = located(chunks, i, CHUNK)
    start += tl.program_id(1) * BLOCK
    end_of_trace = end * tl.load(ok).to(tl.int64)  # a step that must leave no trace writes nothing
    group = tl.arange(0, WIDE)
    there = group < RANK
    if AGAIN:
        weights = tl.load(taken + which * RANK + group, mask=there, other=0.0)
    else:
        weights = _line(start_of_w, slope_of_w, s, LINE, CLAMP, RANK, WIDE)
        tl.store(taken + which * RANK + group, weights, mask=group < tl.where(start == 0, RANK, 0))
    w = tl.sum(weights)
    if RANK > 1:  # of the gradient; and of the columns, which add up to it as a rule
        w = tl.sum(weights * tl.load(fractions + group, mask=there, other=0.0))
        weights = tl.where(there, weights - w, 0.0)
    g_at = pointer(grads, which, GRAD, ALIGNED)
    columns_at = pointer(columns, which, tl.float32, ALIGNED)
    theta_at = pointer(others, which, PARAM, ALIGNED)
    m_at = pointer(others + n, which, tl.float32, ALIGNED)
    v_at = pointer(others + 2 * n, which, tl.float32, ALIGNED)
    rate = tl.load(lr).to(tl.float32) if RATE_ON_DEVICE else lr
    stride = rate
    if MOMENTUM and AVERAGED:
        stride = rate / _weight_of_average(clock, log_mu)
    weight = 1.0
    if ADAPTIVE and CORRECTED:
        weight = _weight_of_average(clock, log_keep)
    gamma = 0.0
    if DECAY or DECOUPLED:
        gamma = tl.load(decays + which)
    if ALIGNED and RANK > 1:
        end = tl.multiple_of(end, 4)
    at = start + tl.arange(0, BLOCK)
    inside = at < end
    g = SIGN * tl.load(g_at + at, mask=inside, other=0.0).to(tl.float32)
    theta = tl.zeros([BLOCK], tl.float32)
    if MOVE or DECAY:
        theta = tl.load(theta_at + at, mask=inside, other=0.0).to(tl.float32)
    mixed = w * g
    if RANK > 1:
        both = there[:, None] & inside[None, :]
        G = tl.load(columns_at + group[:, None] * end + at[None, :], mask=both, other=0.0)
        mixed += SIGN * tl.sum(weights[:, None] * G, 0)
    direction = players * mixed
    if DECAY:
        direction += gamma * theta
    if MOMENTUM:
        m = mu * tl.load(m_at + at, mask=inside, other=0.0) + intake * direction
        if CARRY:
            tl.store(m_at + at, m, mask=at < end_of_trace)
        direction = direction + mu * m if AHEAD else m
    if ADAPTIVE:
        q = g
        if DECAY:
            q = g + share * gamma * theta
        v = keep * tl.load(v_at + at, mask=inside, other=0.0) + fresh * q * q
        if CARRY:
            tl.store(v_at + at, v, mask=at < end_of_trace)
        direction = direction / _diagonal(v, weight, eps)
    if MOVE:
        change = stride * direction
        if DECOUPLED:
            change += rate * gamma * theta
        tl.store(theta_at + at, (theta - change).to(PARAM), mask=at < end_of_trace)

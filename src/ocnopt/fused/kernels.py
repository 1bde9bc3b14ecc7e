"""The kernels. Each runs over all parameters of a shelf, in chunks; a table says where each parameter has its numbers.

They are written for float32 arithmetic, whatever the parameters are of. Nothing is added up in an order that could
change: the same numbers in give the same numbers out.
"""

import torch
import triton
import triton.language as tl

#: numbers of a parameter that one program looks at, and how many of them at a time
CHUNK, BLOCK = 4096, 1024

#: do the kernels run in Triton's interpreter, on the CPU?
INTERPRETED = bool(triton.knobs.runtime.interpret)

#: what parameters and gradients may be of
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

#: the least positive number that is not denormal
_TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _located(chunks, i, CHUNK: tl.constexpr):
    """Which parameter, and from where to where."""
    return tl.load(chunks + 3 * i), tl.load(chunks + 3 * i + 1) * CHUNK, tl.load(chunks + 3 * i + 2)


@triton.jit
def _pointer(addresses, which, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(addresses + which).to(tl.pointer_type(KIND))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _weight_of_average(clock, log_rate):
    """1 − μ^t, this step counted. In float64, where the difference loses no digits that matter."""
    t = tl.load(clock).to(tl.float64) + 1.0
    return (1.0 - tl.exp(t * log_rate)).to(tl.float32)


@triton.jit
def _diagonal(v, weight, eps):
    """√(v / weight) + ε; 0/0 is no step."""
    return tl.maximum(tl.sqrt(v / weight) + eps, _TINY)


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
    which, start, end = _located(chunks, i, CHUNK)
    g_at = _pointer(grads, which, GRAD, ALIGNED)
    theta_at = _pointer(others, which, PARAM, ALIGNED)
    m_at = _pointer(others + n, which, tl.float32, ALIGNED)
    v_at = _pointer(others + 2 * n, which, tl.float32, ALIGNED)
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
            v = keep * tl.load(v_at + at, mask=inside, other=0.0) + (1.0 - keep) * q * q
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


@triton.jit(do_not_specialize=["n", "first"])
def act(
    grads,
    others,
    chunks,
    decays,
    clock,
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
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """θ ← θ − φ M^{-1} (N g w + ℓ) if ``MOVE``; momentum and second moments go on if ``CARRY``.

    w is what the policy asks for, a number or a line in s, within bounds. It is noted in ``taken``, where ``AGAIN``
    finds it.
    """
    i = first + tl.program_id(0)
    which, start, end = _located(chunks, i, CHUNK)
    end_of_trace = end * tl.load(ok).to(tl.int64)  # a step that must leave no trace writes nothing
    if AGAIN:
        w = tl.load(taken + which)
    else:
        w = tl.load(start_of_w)
        if LINE:
            w += tl.load(slope_of_w) * tl.load(s)
        w = tl.where(tl.abs(w) < float("inf"), w, 0.0)  # a kernel beyond all numbers: do not move
        if CLAMP:
            w = tl.minimum(tl.maximum(w, 0.0), 1.0)
        tl.store(taken + which, w, mask=start == 0)
    g_at = _pointer(grads, which, GRAD, ALIGNED)
    theta_at = _pointer(others, which, PARAM, ALIGNED)
    m_at = _pointer(others + n, which, tl.float32, ALIGNED)
    v_at = _pointer(others + 2 * n, which, tl.float32, ALIGNED)
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
    for j in range(0, CHUNK, BLOCK):
        at = start + j + tl.arange(0, BLOCK)
        inside = at < end
        g = SIGN * tl.load(g_at + at, mask=inside, other=0.0).to(tl.float32)
        theta = tl.zeros([BLOCK], tl.float32)
        if MOVE or DECAY:
            theta = tl.load(theta_at + at, mask=inside, other=0.0).to(tl.float32)
        direction = players * w * g
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
            v = keep * tl.load(v_at + at, mask=inside, other=0.0) + (1.0 - keep) * q * q
            if CARRY:
                tl.store(v_at + at, v, mask=at < end_of_trace)
            direction = direction / _diagonal(v, weight, eps)
        if MOVE:
            change = stride * direction
            if DECOUPLED:
                change += rate * gamma * theta
            tl.store(theta_at + at, (theta - change).to(PARAM), mask=at < end_of_trace)


@triton.jit(do_not_specialize=["numbers"])
def dot(x, y, less, partials, arrivals, result, numbers, LESS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """⟨x, y⟩, less a number. The program that arrives last adds up what the others have left."""
    i, programs = tl.program_id(0), tl.num_programs(0)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(i * CHUNK, numbers, programs * CHUNK):
        for j in range(0, CHUNK, BLOCK):
            at = start + j + tl.arange(0, BLOCK)
            inside = at < numbers
            here = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            sums += here * tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(partials + i, tl.sum(sums))
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem="acq_rel") == programs - 1:
        at = tl.arange(0, BLOCK)
        found = tl.sum(tl.load(partials + at, mask=at < programs, other=0.0, volatile=True))
        if LESS:
            found -= tl.load(less)
        tl.store(result, found)
        tl.store(arrivals, 0)  # for the next time


@triton.jit
def dots(
    addresses,
    shares,
    partials,
    pairs,
    X: tl.constexpr,
    Y: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Inner products of many pairs, or of rows of them. ``addresses: [2, pairs]``. ``shares: [programs, 5]``: the pair,
    the row's first number, which of the programs of the row it is, how many these are, and the numbers in the row. Each
    leaves its part of the sum, which is made of the same parts as one of ``dot``.
    """
    i = tl.program_id(0)
    which, offset = tl.load(shares + 5 * i), tl.load(shares + 5 * i + 1)
    first, programs, numbers = tl.load(shares + 5 * i + 2), tl.load(shares + 5 * i + 3), tl.load(shares + 5 * i + 4)
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    x = _pointer(addresses, which, X, ALIGNED) + offset
    y = _pointer(addresses + pairs, which, Y, ALIGNED) + offset
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(first * CHUNK, numbers, programs * CHUNK):
        for j in range(0, CHUNK, BLOCK):
            at = start + j + tl.arange(0, BLOCK)
            inside = at < numbers
            here = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
            sums += here * tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(partials + i, tl.sum(sums))


@triton.jit
def sums(partials, firsts, results, BLOCK: tl.constexpr):
    """Of the parts of each product: no more than a block."""
    i, at = tl.program_id(0), tl.arange(0, BLOCK)
    start, end = tl.load(firsts + i), tl.load(firsts + i + 1)
    tl.store(results + i, tl.sum(tl.load(partials + start + at, mask=start + at < end, other=0.0)))

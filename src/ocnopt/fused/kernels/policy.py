"""The policy of all stages."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def lines(
    K,
    u,
    free,
    stages,
    precision,
    lr,
    starts,
    slopes,
    rows,
    stride,
    of_K,
    of_u,
    COST: tl.constexpr,
    FREE: tl.constexpr,
    RATE_ON_DEVICE: tl.constexpr,
    RANK: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """J^{-1} b and J^{-1} of each stage, with J = Σ_K^{-1} + Σ_{j≥k} K_j and b = Σ_K^{-1} 1 − Σ_{j≥k} u_j over the
    ``rows`` of parameters; NaN where J is not positive definite.
    """
    k = tl.program_id(0)
    rate = tl.load(lr).to(tl.float32) if RATE_ON_DEVICE else lr
    group = tl.arange(0, WIDE)
    there = group < RANK
    entry = tl.arange(0, WIDE * WIDE)
    one, other = entry // WIDE, entry % WIDE
    inside = (one < RANK) & (other < RANK)
    flat = tl.zeros([WIDE * WIDE], tl.float32)
    cost = tl.zeros([WIDE], tl.float32)
    for j in range(0, rows, BLOCK):
        at = j + tl.arange(0, BLOCK)
        later = tl.load(stages + at, mask=at < rows, other=-1) >= k
        place, mine = (at * stride)[:, None], later[:, None] & there[None, :]
        entries = tl.load(K + place + (one * RANK + other)[None, :], mask=later[:, None] & inside[None, :], other=0.0)
        flat += tl.sum(entries, 0)
        if COST:
            cost += of_u * tl.sum(
                tl.load(u + place + group[None, :], mask=later[:, None] & there[None, :], other=0.0), 0
            )
        if FREE:
            cost += tl.sum(tl.load(free + place + group[None, :], mask=mine, other=0.0), 0)
    last = tl.load(precision + group, mask=there, other=1.0)
    M = tl.reshape(rate * of_K * flat, [WIDE, WIDE]) + tl.where(group[:, None] == group[None, :], last[:, None], 0.0)
    b = tl.where(there, last - rate * cost, 0.0)
    for p in tl.static_range(RANK):  # the inverse, in the place of the matrix
        in_row, in_column = group[:, None] == p, group[None, :] == p
        row, column = tl.sum(tl.where(in_row, M, 0.0), 0), tl.sum(tl.where(in_column, M, 0.0), 1)
        pivot = tl.sum(tl.where(group == p, row, 0.0))
        pivot = tl.where(pivot > 0, pivot, float("nan"))
        eliminated = M - column[:, None] * row[None, :] / pivot
        edges = tl.where(in_row, row[None, :] / pivot, -column[:, None] / pivot)
        M = tl.where(in_row & in_column, 1.0 / pivot, tl.where(in_row | in_column, edges, eliminated))
    both = there[:, None] & there[None, :]
    tl.store(slopes + k * RANK * RANK + group[:, None] * RANK + group[None, :], M, mask=both)
    tl.store(starts + k * RANK + group, tl.sum(tl.where(both, M * b[None, :], 0.0), 1), mask=there)

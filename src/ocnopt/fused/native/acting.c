/* The kernels of ocnopt/fused/kernels/acting.py, for a CPU: what they do is said there, and what each quantity is, in
   ocnopt/bucket.py and ocnopt/curvature/adaptive.py. Nothing is added up in an order that depends on the number of
   threads. */

#include <float.h>
#include <math.h>

#include "vectors.h"

enum {
    BLOCK = 512,    /* numbers that stay next to a core; they are added up in few digits, and blocks in many */
    WIDE = 4096,    /* of whole lines of them; none is longer than a block */
    MOST = 8        /* groups of samples */
};

typedef struct {
    const int64_t *chunks;       /* [chunks, 3]: parameter, which of its chunks this is, how many numbers it has */
    const float *const *grads;   /* [parameters] */
    float *const *thetas;        /* [parameters] */
    float *const *momenta;       /* [parameters]; null without momentum */
    float *const *moments;       /* [parameters]; null with the identity for a metric */
    float *const *columns;       /* [parameters]: a gradient for each group, one after another; null if all are one */
    const int64_t *lines;        /* [parameters, 3]: numbers in a line; those that columns have, and where they are */
    const int32_t *places;       /* of the numbers that columns have, in as many lines as fit a block: all others are zero */
    const float *fractions;      /* [groups]: ν */
    const float *decays;         /* [parameters]: γ */
    int64_t coupled, decoupled;  /* is γθ a part of the linear cost? Is it taken off beside the policy? */
    int64_t rank, chunk, threads;
    float sign;                  /* -1 where the loss is maximised */
    float keep, fresh;           /* of the second moments: shares of what they were, and of a square */
    float weight, eps;           /* C = √(v / weight) + ε */
    float share;                 /* of the decay, that one of N fictitious players has */
} Shelf;

typedef struct {
    const float *w;              /* [groups] */
    float *taken;                /* [parameters, groups]: the w that they act with are noted here */
    float mu, intake, players;   /* of the momentum; N */
    float stride, rate;          /* what directions, and decoupled decays, are multiplied by */
    int64_t again;               /* have they acted before, with what is noted? */
    int64_t ahead;               /* does the momentum look ahead? */
    int64_t move, carry;         /* do parameters move? Does state go on? */
} Act;

/* Whole lines of one parameter. */
typedef struct {
    int64_t which, start, end, size; /* the last: of the parameter */
    int64_t line, kept;              /* numbers in a line; those that columns have */
    const int32_t *places;
    float coupled, decoupled;        /* γ */
} Range;

static int64_t rounded_up(int64_t n, int64_t line) { return (n + line - 1) / line * line; }

/* A line belongs to the chunk that it begins in. */
static Range range_of(const Shelf *shelf, int64_t i) {
    const int64_t *row = shelf->chunks + 3 * i, *lines = shelf->lines + 3 * row[0];
    int64_t start = rounded_up(row[1] * shelf->chunk, lines[0]), end = rounded_up((row[1] + 1) * shelf->chunk, lines[0]);
    float gamma = shelf->decays[row[0]];
    return (Range){row[0], start, least(end, row[2]), row[2], lines[0], lines[1], shelf->places + lines[2],
                   shelf->coupled ? gamma : 0, shelf->decoupled ? gamma : 0};
}

static int threads_for(const Shelf *shelf, int64_t first, int64_t count) {
    int64_t numbers = 0;
    for (int64_t i = first; i < first + count; i++) {
        const int64_t *row = shelf->chunks + 3 * i;
        numbers += least(row[2] - row[1] * shelf->chunk, shelf->chunk);
    }
    return numbers > FEW ? (int)shelf->threads : 1;
}

/* γθ. Where there is no γ, θ need be no number. */
static inline float decayed(float gamma, float theta) { return gamma != 0 ? gamma * theta : 0; }

/* v as it is going to be in this step: q is the gradient of the Bellman objective. */
static inline float moment(const Shelf *shelf, float v, float q) {
    return shelf->keep * v + shelf->fresh * q * q;
}

/* √(v / weight) + ε. A root of zero takes some CPUs four times as long as any other; NaN goes on. */
static inline float diagonal(const Shelf *shelf, float v) {
    float mean = v / shelf->weight;
    return sqrtf(mean < FLT_MIN ? FLT_MIN : mean) + shelf->eps;
}

/* sums: g^T C^{-1} g, g^T C^{-1} ℓ, g^T γθ, g^T g; and gradients where there is no column: none. */
SPECIALISED look_at(const Shelf *all, float cost, Range r, double *sums, int momentum, int adaptive, int decay) {
    const Shelf shelf = *all;
    const float *restrict g_at = shelf.grads[r.which], *restrict theta_at = shelf.thetas[r.which];
    const float *restrict m_at = momentum ? shelf.momenta[r.which] : 0;
    const float *restrict v_at = adaptive ? shelf.moments[r.which] : 0;
    float shared = shelf.share * r.coupled;
    for (int i = 0; i < 5; i++) sums[i] = 0;
    for (int64_t start = r.start; start < r.end; start += BLOCK) {
        int64_t end = least(start + BLOCK, r.end);
        float K = 0, u = 0, free = 0, squares = 0;
#pragma omp simd reduction(+ : K, u, free, squares)
        for (int64_t k = start; k < end; k++) {
            float g = shelf.sign * g_at[k], theta = decay ? theta_at[k] : 0;
            float linear = (momentum ? cost * m_at[k] : 0) + decayed(r.coupled, theta);
            float C_g = adaptive ? g / diagonal(&shelf, moment(&shelf, v_at[k], g + decayed(shared, theta))) : g;
            K += g * C_g;
            u += linear * C_g;
            free += decayed(r.decoupled, theta) * g;
            squares += g * g;
        }
        sums[0] += K, sums[1] += u, sums[2] += free, sums[3] += squares;
    }
}

static int kind_of(const Shelf *shelf) {
    return (shelf->momenta ? 1 : 0) | (shelf->moments ? 2 : 0) | (shelf->coupled || shelf->decoupled ? 4 : 0);
}

static void look_at_all(const Shelf *shelf, float cost, Range r, double *sums) {
#define CASE(k) case k: look_at(shelf, cost, r, sums, k & 1, k & 2, k & 4); break;
    switch (kind_of(shelf)) { CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) }
#undef CASE
}

enum {
    SIDE = 3,                                        /* of a tile of products, all of which stay in registers */
    ROWS = (1 + MOST + SIDE - 1) / SIDE * SIDE
};

/* Of what columns have: g, γθ of a decoupled decay and 1 / C; ℓ, G and zeros up to a whole tile. What is multiplied by
   vectors is followed by zeros up to a whole one. */
typedef struct {
    float g[BLOCK], free[BLOCK], inverse[BLOCK], rows[ROWS][BLOCK];
} Block;

/* A processor foresees what is read next of a few arrays, not of twelve. Beyond the end it does no harm. */
SPECIALISED fetch(const float *x, int64_t n) {
    for (int64_t k = 0; k < n; k += LANES) __builtin_prefetch(x + k);
}

SPECIALISED read_block(const Shelf *all, float cost, Range r, int64_t at, int64_t n, Block *block, int momentum,
                       int adaptive, int decay, int in_lines) {
    const Shelf shelf = *all;
    const float *restrict g_at = shelf.grads[r.which] + at, *restrict theta_at = shelf.thetas[r.which] + at;
    const float *restrict m_at = momentum ? shelf.momenta[r.which] + at : 0;
    const float *restrict v_at = adaptive ? shelf.moments[r.which] + at : 0;
    float shared = shelf.share * r.coupled;
    /* In lines, what is gathered now (gradients have been counted); otherwise, what comes next. */
    int64_t ahead = in_lines ? 0 : n, span = in_lines ? n / r.kept * r.line : n;
    if (!in_lines) fetch(g_at + ahead, span);
    if (momentum) fetch(m_at + ahead, span);
    if (adaptive) fetch(v_at + ahead, span);
#pragma omp simd
    for (int64_t k = 0; k < n; k++) {
        int64_t from = in_lines ? r.places[k] : k;
        float g = shelf.sign * g_at[from], theta = decay ? theta_at[from] : 0;
        block->g[k] = g;
        block->rows[0][k] = (momentum ? cost * m_at[from] : 0) + decayed(r.coupled, theta);
        block->free[k] = decayed(r.decoupled, theta);
        if (adaptive) block->inverse[k] = 1 / diagonal(&shelf, moment(&shelf, v_at[from], g + decayed(shared, theta)));
    }
}

static void read_numbers(const Shelf *shelf, float cost, Range r, int64_t at, int64_t n, Block *block) {
#define CASE(k)                                                                                                        \
    case k: read_block(shelf, cost, r, at, n, block, k & 1, k & 2, k & 4, 0); break;                                   \
    case k + 8: read_block(shelf, cost, r, at, n, block, k & 1, k & 2, k & 4, 1); break;
    switch (kind_of(shelf) | (r.line > 1 ? 8 : 0)) { CASE(0) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) }
#undef CASE
    for (int64_t k = n; k % LANES; k++) block->rows[0][k] = block->inverse[k] = 0;
}

static float dot(const float *restrict x, const float *restrict y, int64_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < n; k++) sum += x[k] * y[k];
    return sum;
}

static inline float sum_of(Vector v) {
    float x[LANES];
    memcpy(x, &v, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) x[lane] += x[lane + half];
    return x[0];
}

/* Zeros after the end. */
static inline __attribute__((always_inline)) Vector loaded(const float *x, int64_t left) {
    Vector found = {0};
    if (left >= LANES) memcpy(&found, x, sizeof found);
    else memcpy(&found, x, (size_t)left * sizeof *x);
    return found;
}

/* Columns that add up to the gradient: whatever it has beyond their sum is theirs by ν. The squares of what is read.
   All columns are read side by side, as memory likes it. */
SPECIALISED read_columns(const Shelf *shelf, Range r, int64_t at, int64_t n, Block *block, double *squares, int rank) {
    const float *found = shelf->columns[r.which] + at;
    int64_t numbers = r.size / r.line * r.kept;
    Vector sums[1 + MOST] = {0};
    for (int64_t k = 0; k < n; k += LANES) {
        Vector g = loaded(block->g + k, n - k), rest = g, G[MOST];
        sums[rank] += g * g;
#pragma GCC unroll 8
        for (int i = 0; i < rank; i++) {
            __builtin_prefetch(found + i * numbers + k + BLOCK);
            G[i] = shelf->sign * loaded(found + i * numbers + k, n - k);
            rest -= G[i];
            sums[i] += G[i] * G[i];
        }
#pragma GCC unroll 8
        for (int i = 0; i < rank; i++) {
            G[i] += shelf->fractions[i] * rest;
            memcpy(block->rows[1 + i] + k, &G[i], sizeof G[i]);
        }
    }
#pragma GCC unroll 9
    for (int i = 0; i <= rank; i++) *squares += sum_of(sums[i]);
}

static void read_groups(const Shelf *shelf, Range r, int64_t at, int64_t n, Block *block, double *squares) {
#define CASE(k) case k: read_columns(shelf, r, at, n, block, squares, k); break;
    switch (shelf->rank) { CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
}

/* products[i][j] += x_i^T C^{-1} y_j of a tile. */
SPECIALISED tile(float (*x)[BLOCK], float (*y)[BLOCK], const float *inverse, int64_t n, double (*products)[ROWS],
                 int adaptive) {
    Vector sums[SIDE][SIDE] = {0}, here[SIDE], there[SIDE], scale;
    for (int64_t k = 0; k < n; k += LANES) {
        if (adaptive) memcpy(&scale, inverse + k, sizeof scale);
#pragma GCC unroll 3
        for (int i = 0; i < SIDE; i++) {
            memcpy(&here[i], x[i] + k, sizeof here[i]);
            memcpy(&there[i], y[i] + k, sizeof there[i]);
            if (adaptive) there[i] *= scale;
        }
#pragma GCC unroll 3
        for (int i = 0; i < SIDE; i++)
#pragma GCC unroll 3
            for (int j = 0; j < SIDE; j++) sums[i][j] += here[i] * there[j];
    }
    for (int i = 0; i < SIDE; i++)
        for (int j = 0; j < SIDE; j++) products[i][j] += sum_of(sums[i][j]);
}

static void tile_plain(float (*x)[BLOCK], float (*y)[BLOCK], const float *inverse, int64_t n, double (*products)[ROWS]) {
    tile(x, y, inverse, n, products, 0);
}

static void tile_adaptive(float (*x)[BLOCK], float (*y)[BLOCK], const float *inverse, int64_t n,
                          double (*products)[ROWS]) {
    tile(x, y, inverse, n, products, 1);
}

/* How many are not zero. */
static int32_t count(const float *x, int64_t n) {
    int32_t found = 0;
#pragma omp simd reduction(+ : found)
    for (int64_t k = 0; k < n; k++) found += x[k] != 0;
    return found;
}

/* sums: K, [groups, groups], on its diagonal and below; u, free, [groups]; squares; gradients that are not zero where
   columns have nothing. */
static void look_by_group(const Shelf *shelf, float cost, Range r, double *sums) {
    int64_t rank = shelf->rank, end = r.end / r.line * r.kept, step = BLOCK / r.kept * r.kept;
    double products[ROWS][ROWS] = {{0}}, *u = sums + rank * rank, *free = u + rank, *squares = free + rank;
    double *strays = squares + 1;
    Block block;
    for (double *sum = free; sum <= strays; sum++) *sum = 0;
    memset(block.rows[1 + rank], 0, (size_t)(ROWS - 1 - rank) * sizeof *block.rows);
    for (int64_t at = r.start / r.line * r.kept; at < end; at += step) {
        int64_t n = least(step, end - at), from = at / r.kept * r.line;
        if (r.line > 1) *strays += (double)count(shelf->grads[r.which] + from, n / r.kept * r.line);
        read_numbers(shelf, cost, r, from, n, &block);
        if (r.line > 1) *strays -= (double)count(block.g, n);
        read_groups(shelf, r, at, n, &block, squares);
        for (int64_t i = 0; i <= rank; i += SIDE)
            for (int64_t j = 0; j <= i; j += SIDE)
                (shelf->moments ? tile_adaptive : tile_plain)(block.rows + i, block.rows + j, block.inverse, n,
                                                              (double(*)[ROWS])&products[i][j]);
        for (int64_t j = 0; shelf->decoupled && j < rank; j++) free[j] += dot(block.free, block.rows[1 + j], n);
    }
    for (int64_t i = 0; i < rank; i++) {
        u[i] = products[1 + i][0];
        for (int64_t j = 0; j <= i; j++) sums[i * rank + j] = products[1 + i][1 + j];
    }
}

/* rows: [parameters, width]: G^T C^{-1} G, G^T C^{-1} ℓ, G^T γθ and the squares of all that is read; ℓ = γθ + cost · m.
   partials: [chunks, width + 1]. Returns how many gradients are not zero where columns have nothing. */
int64_t ocnopt_look(const Shelf *shelf, int64_t total, float cost, double *partials, float *rows, int64_t parameters) {
    int64_t rank = shelf->rank, width = rank * rank + 2 * rank + 1, strays = 0;
    int threads = threads_for(shelf, 0, total);
/* Chunks take unequal time: of some, columns have a ninth. */
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < total; i++) {
        Range r = range_of(shelf, i);
        if (shelf->columns) look_by_group(shelf, cost, r, partials + i * (width + 1));
        else look_at_all(shelf, cost, r, partials + i * (width + 1));
    }
    for (int64_t which = 0, i = 0; which < parameters; which++) {
        double sums[MOST * MOST + 2 * MOST + 2] = {0};
        float *row = rows + which * width;
        for (; i < total && shelf->chunks[3 * i] == which; i++)
            for (int64_t k = 0; k <= width; k++) sums[k] += partials[i * (width + 1) + k];
        for (int64_t k = 0; k < width; k++) row[k] = (float)sums[k];
        for (int64_t i = 0; i < rank; i++)
            for (int64_t j = 0; j < i; j++) row[j * rank + i] = row[i * rank + j];
        strays += (int64_t)sums[width];
    }
    return strays;
}

/* `n` numbers from `at` on. mixed: what groups have beyond w g; null if all are one. */
SPECIALISED step(const Shelf *all, const Act *how, Range r, int64_t at, int64_t n, float w, const float *restrict mixed,
                 int momentum, int adaptive, int move, int carry) {
    const Shelf shelf = *all;
    const Act act = *how;
    const float *restrict g_at = shelf.grads[r.which] + at;
    float *restrict theta_at = shelf.thetas[r.which] + at;
    float *restrict m_at = momentum ? shelf.momenta[r.which] + at : 0;
    float *restrict v_at = adaptive ? shelf.moments[r.which] + at : 0;
    float shared = shelf.share * r.coupled, left = 1 - act.rate * r.decoupled;
    float of_direction = act.ahead ? 1 : 0, of_m = act.ahead ? act.mu : 1;
#pragma omp simd
    for (int64_t k = 0; k < n; k++) {
        float g = shelf.sign * g_at[k], theta = move ? theta_at[k] : 0;
        float direction = act.players * (w * g + (mixed ? mixed[k] : 0)) + decayed(r.coupled, theta);
        if (momentum) {
            float m = act.mu * m_at[k] + act.intake * direction;
            if (carry) m_at[k] = m;
            direction = of_direction * direction + of_m * m;
        }
        if (adaptive) {
            float v = moment(&shelf, v_at[k], g + decayed(shared, theta));
            if (carry) v_at[k] = v;
            if (move) direction /= diagonal(&shelf, v);
        }
        if (move) theta_at[k] = left * theta - act.stride * direction;
    }
}

SPECIALISED mix_some(const float *G, int64_t numbers, const float *w, int64_t n, float *restrict mixed, int rank) {
#pragma omp simd
    for (int64_t k = 0; k < n; k++) {
        float sum = 0;
        for (int i = 0; i < rank; i++) sum += w[i] * G[i * numbers + k];
        mixed[k] = sum;
    }
}

/* Σ w G of some lines, a number for each that the parameter has. When they act again, they find it in the place of the
   first column. */
static void mix(const Shelf *shelf, const Act *act, Range r, const float *w, int64_t at, int64_t n, float *mixed) {
    float *G = shelf->columns[r.which] + at / r.line * r.kept, sums[BLOCK], *into = r.line > 1 ? sums : mixed;
    int64_t numbers = r.size / r.line * r.kept, count = n / r.line * r.kept;
#define CASE(k) case k: mix_some(G, numbers, w, count, into, k); break;
    switch (act->again ? 0 : shelf->rank) {
        case 0: memcpy(into, G, (size_t)count * sizeof *G); break;
        CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
    }
#undef CASE
    if (!act->carry) memcpy(G, into, (size_t)count * sizeof *G);
    if (r.line == 1) return;
    memset(mixed, 0, (size_t)n * sizeof *mixed);
    for (int64_t k = 0; k < count; k++) mixed[r.places[k]] = sums[k];
}

SPECIALISED act_on(const Shelf *shelf, const Act *act, Range r, int momentum, int adaptive, int move, int carry) {
    int64_t rank = shelf->rank, lines = least(BLOCK / r.kept, WIDE / r.line);
    float *taken = act->taken + r.which * rank, weights[MOST], mixed[WIDE], w = 0;
    for (int64_t i = 0; i < rank; i++) {
        weights[i] = act->again ? taken[i] : act->w[i];
        if (!act->again && r.start == 0) taken[i] = weights[i];
    }
    if (!shelf->columns) {
        step(shelf, act, r, r.start, r.end - r.start, weights[0], 0, momentum, adaptive, move, carry);
        return;
    }
    for (int64_t i = 0; i < rank; i++) w += weights[i] * shelf->fractions[i]; /* of the gradient */
    for (int64_t i = 0; i < rank; i++) weights[i] = shelf->sign * (weights[i] - w); /* of columns, which add up to it */
    for (int64_t at = r.start; at < r.end; at += lines * r.line) {
        int64_t n = least(lines * r.line, r.end - at);
        mix(shelf, act, r, weights, at, n, mixed);
        step(shelf, act, r, at, n, w, mixed, momentum, adaptive, move, carry);
    }
}

/* θ ← θ − φ M^{-1} (N G w + ℓ), of some chunks. State goes on beside that; or by itself, where no decay is a part of
   the linear cost. */
void ocnopt_act(const Shelf *shelf, const Act *act, int64_t first, int64_t count) {
    int kind = (shelf->momenta ? 1 : 0) | (shelf->moments ? 2 : 0) | (act->move ? 4 : 0) | (act->carry ? 8 : 0);
    int threads = threads_for(shelf, first, count);
#define CASE(n) case n: act_on(shelf, act, range_of(shelf, i), n & 1, n & 2, n & 4, n & 8); break;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = first; i < first + count; i++)
        switch (kind) {
            CASE(4) CASE(5) CASE(6) CASE(7) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15)
        }
#undef CASE
}

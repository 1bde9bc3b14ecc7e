/* Gradients of a convolution's weight by group of samples: Σ h x^T over samples and positions, for each tap of the
   kernel. Where a tap sees nothing but padding, nothing is multiplied. */

#include "vectors.h"

enum {
    HIGH = sizeof(Vector) == 64 ? 8 : 4, /* of a tile, all of which stays in registers: channels of the output */
    WIDE = 2,                            /* vectors of channels of the input */
    SPAN = WIDE * LANES
};

typedef struct {
    const float *x;              /* [samples, pixels, wide]: channels of the input, and zeros up to a whole tile */
    const float *h;              /* [samples, positions, high]: the same of the output */
    const int32_t *pairs;        /* [pairs, 2]: a position, and the pixel that a tap sees from there */
    const int64_t *taps;         /* [taps + 1]: where the pairs of each begin */
    const int64_t *samples;      /* [groups + 1]: where those of each begin */
    float *gradients;            /* [groups, outputs, inputs, taps] */
    int64_t pixels, positions, wide, high, inputs, outputs, kernel, groups, threads;
} Taps;

/* Σ h x^T of one tap and one group. */
static inline void tile(const Taps *all, int64_t tap, int64_t group, int64_t output, int64_t input,
                        Vector (*sums)[WIDE]) {
    int64_t of_x = all->pixels * all->wide, of_h = all->positions * all->high;
    int64_t count = all->samples[group + 1] - all->samples[group];
    const float *x_at = all->x + all->samples[group] * of_x + input;
    const float *h_at = all->h + all->samples[group] * of_h + output;
    Vector found[HIGH][WIDE] = {0};
    for (int64_t k = all->taps[tap]; k < all->taps[tap + 1]; k++) {
        const float *h = h_at + all->pairs[2 * k] * all->high, *x = x_at + all->pairs[2 * k + 1] * all->wide;
        for (int64_t sample = 0; sample < count; sample++, h += of_h, x += of_x) {
            Vector row[WIDE];
            memcpy(row, x, sizeof row);
#pragma GCC unroll 8
            for (int i = 0; i < HIGH; i++)
#pragma GCC unroll 2
                for (int j = 0; j < WIDE; j++) found[i][j] += h[i] * row[j];
        }
    }
    memcpy(sums, found, sizeof found);
}

/* How many numbers a register holds. */
int64_t ocnopt_lanes(void) { return LANES; }

void ocnopt_taps(const Taps *all) {
    int64_t high = all->high / HIGH, wide = all->wide / SPAN;
    int threads = all->groups * all->outputs * all->inputs * all->kernel > FEW ? (int)all->threads : 1;
#pragma omp parallel for collapse(3) schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t group = 0; group < all->groups; group++)
        for (int64_t i = 0; i < high; i++)
            for (int64_t j = 0; j < wide; j++) {
                int64_t outputs = least(HIGH, all->outputs - i * HIGH), inputs = least(SPAN, all->inputs - j * SPAN);
                float *into = all->gradients + ((group * all->outputs + i * HIGH) * all->inputs + j * SPAN) * all->kernel;
                for (int64_t tap = 0; tap < all->kernel; tap++) {
                    Vector sums[HIGH][WIDE];
                    tile(all, tap, group, i * HIGH, j * SPAN, sums);
                    for (int64_t output = 0; output < outputs; output++)
                        for (int64_t input = 0; input < inputs; input++)
                            into[(output * all->inputs + input) * all->kernel + tap] = ((float *)sums[output])[input];
                }
            }
}

/* All gradients of a batch norm by the statistics of the batch, those of groups of samples among them. A few channels of
   all samples are read twice, and stay next to a core in between unless images are large. */

#include "vectors.h"

enum { WIDE = 256 }; /* numbers of a sample that are seen to at a time */

typedef struct {
    const float *x, *h;              /* [samples, channels, positions] */
    const float *mean, *scale, *weight; /* [channels]; 1/σ is the scale */
    const int64_t *samples;          /* [groups + 1]: where those of each begin */
    float *into;                     /* [samples, channels, positions]: ∂L/∂x */
    float *products, *sums;          /* [groups, channels]: Σ h x̂ and Σ h */
    float *of_weight, *of_bias;      /* [channels]: those of all groups */
    int64_t channels, positions, groups, threads;
} Norm;

/* Of all samples: some positions of some channels, one after another. */
typedef struct {
    int64_t first, count;            /* channels */
    int64_t at, span;                /* positions of each */
} Range;

/* To each place what its channel has. */
static void spread(const float *of_channels, Range r, float *places) {
    for (int64_t i = 0; i < r.count; i++)
        for (int64_t k = 0; k < r.span; k++) places[i * r.span + k] = of_channels[i];
}

/* products += Σ h (x − mean), sums += Σ h of some samples. */
static void add_up(const Norm *all, Range r, int64_t sample, int64_t end, double *products, double *sums) {
    int64_t row = all->channels * all->positions, from = r.first * all->positions + r.at, n = r.count * r.span;
    float mean[WIDE], product[WIDE] = {0}, sum[WIDE] = {0};
    spread(all->mean + r.first, r, mean);
    for (; sample < end; sample++) {
        const float *restrict x = all->x + sample * row + from, *restrict h = all->h + sample * row + from;
#pragma omp simd
        for (int64_t k = 0; k < n; k++) {
            product[k] += h[k] * (x[k] - mean[k]);
            sum[k] += h[k];
        }
    }
    for (int64_t i = 0; i < r.count; i++)
        for (int64_t k = i * r.span; k < (i + 1) * r.span; k++) products[i] += product[k], sums[i] += sum[k];
}

/* into = factor (h − shift − slope (x − mean)), of all samples. */
static void pull_back(const Norm *all, Range r, const float *factors, const float *shifts, const float *slopes) {
    int64_t row = all->channels * all->positions, from = r.first * all->positions + r.at, n = r.count * r.span;
    float mean[WIDE], factor[WIDE], shift[WIDE], slope[WIDE];
    spread(all->mean + r.first, r, mean);
    spread(factors, r, factor);
    spread(shifts, r, shift);
    spread(slopes, r, slope);
    for (int64_t sample = 0; sample < all->samples[all->groups]; sample++) {
        const float *restrict x = all->x + sample * row + from, *restrict h = all->h + sample * row + from;
        float *restrict into = all->into + sample * row + from;
#pragma omp simd
        for (int64_t k = 0; k < n; k++) into[k] = factor[k] * (h[k] - shift[k] - slope[k] * (x[k] - mean[k]));
    }
}

/* `count` channels, of which a sample has no more numbers than there is room for; or one, whose positions come a few at
   a time. */
static void norm(const Norm *all, int64_t first, int64_t count) {
    int64_t span = count > 1 ? all->positions : least(all->positions, WIDE);
    double numbers = (double)(all->samples[all->groups] * all->positions);
    double of_weight[WIDE] = {0}, of_bias[WIDE] = {0};
    float factors[WIDE], shifts[WIDE], slopes[WIDE];
    for (int64_t group = 0; group < all->groups; group++) {
        double products[WIDE] = {0}, sums[WIDE] = {0};
        for (int64_t at = 0; at < all->positions; at += span) {
            Range r = {first, count, at, least(span, all->positions - at)};
            add_up(all, r, all->samples[group], all->samples[group + 1], products, sums);
        }
        for (int64_t i = 0; i < count; i++) {
            double product = products[i] * all->scale[first + i];
            all->products[group * all->channels + first + i] = (float)product, of_weight[i] += product;
            all->sums[group * all->channels + first + i] = (float)sums[i], of_bias[i] += sums[i];
        }
    }
    for (int64_t i = 0; i < count; i++) {
        float scale = all->scale[first + i];
        all->of_weight[first + i] = (float)of_weight[i], all->of_bias[first + i] = (float)of_bias[i];
        factors[i] = scale * all->weight[first + i];
        shifts[i] = (float)(of_bias[i] / numbers), slopes[i] = (float)(scale * of_weight[i] / numbers);
    }
    for (int64_t at = 0; at < all->positions; at += span)
        pull_back(all, (Range){first, count, at, least(span, all->positions - at)}, factors, shifts, slopes);
}

void ocnopt_norm(const Norm *all) {
    int64_t together = all->positions < WIDE ? WIDE / all->positions : 1;
    int threads = all->samples[all->groups] * all->channels * all->positions > FEW ? (int)all->threads : 1;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < all->channels; first += together)
        norm(all, first, least(together, all->channels - first));
}

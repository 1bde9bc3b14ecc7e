/* What the kernels for a CPU have in common. */

#include <stdint.h>
#include <string.h>

/* Is compiled for each combination of the constants that it is called with. */
#define SPECIALISED static inline __attribute__((always_inline)) void

/* As wide as the registers of the processor are. */
#if defined(__AVX512F__)
typedef float Vector __attribute__((vector_size(64)));
#elif defined(__AVX__)
typedef float Vector __attribute__((vector_size(32)));
#else
typedef float Vector __attribute__((vector_size(16)));
#endif

enum {
    LANES = sizeof(Vector) / sizeof(float),
    FEW = 1 << 15 /* numbers that are not worth another thread */
};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

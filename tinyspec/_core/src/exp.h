/* The passes over a row that are worth a processor's widest vectors.

   exp(x) for x <= 0 by multiplications and additions alone, in the order of reference_exp.py: so that both agree to the bit,
   and so that a compiler may do many at once. The method is that of any table of functions (Cody, Waite 1980):
   x = k ln 2 + r, exp(x) = 2^k exp(r), and |r| <= ln 2 / 2 leaves Taylor's series a remainder below 2^-57. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EACH_PROCESSOR
#endif

#define SHIFT 6755399441055744.0 /* 1.5 * 2^52: a number added to it loses its fraction */

/* 2^k of a whole number -1022..1023: the bits of k + SHIFT end in those of k. */
static inline double power(double k) {
    const double moved = k + SHIFT;
    uint64_t bits;
    double scale;
    memcpy(&bits, &moved, sizeof bits);
    bits = (bits + 1023) << 52;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

static inline double exponential(double x) {
    x = x > -746 ? x : -746; /* whose exp is 0 */
    const double k = (x * 1.4426950408889634 + SHIFT) - SHIFT;
    const double r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
    double sum = 1.0 / 6227020800;
    sum = sum * r + 1.0 / 479001600;
    sum = sum * r + 1.0 / 39916800;
    sum = sum * r + 1.0 / 3628800;
    sum = sum * r + 1.0 / 362880;
    sum = sum * r + 1.0 / 40320;
    sum = sum * r + 1.0 / 5040;
    sum = sum * r + 1.0 / 720;
    sum = sum * r + 1.0 / 120;
    sum = sum * r + 1.0 / 24;
    sum = sum * r + 1.0 / 6;
    sum = sum * r + 0.5;
    sum = sum * r + 1;
    sum = sum * r + 1;
    const double half = (k * 0.5 + SHIFT) - SHIFT; /* in two steps, as 2^k alone may be too small a number */
    return sum * power(half) * power(k - half);
}

/* x = exp((x - top) / temperature), top the largest. */
EACH_PROCESSOR static void weigh_all(double *x, long n, double top, double temperature) {
    if (temperature == 1)
        for (long i = 0; i < n; i++) x[i] = exponential(x[i] - top);
    else
        for (long i = 0; i < n; i++) x[i] = exponential((x[i] - top) / temperature);
}

/* The largest of x[n]; NaN if there is one. In lanes, as a maximum waits for the one before it. */
EACH_PROCESSOR static double largest(const double *x, long n) {
    enum { LANES = 16 };
    double most[LANES];
    int64_t wrong[LANES] = {0};
    long i = 0;
    for (int lane = 0; lane < LANES; lane++) most[lane] = -INFINITY;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            most[lane] = x[i + lane] > most[lane] ? x[i + lane] : most[lane];
            wrong[lane] += x[i + lane] != x[i + lane];
        }
    for (; i < n; i++) {
        most[0] = x[i] > most[0] ? x[i] : most[0];
        wrong[0] += x[i] != x[i];
    }
    for (int lane = 1; lane < LANES; lane++) {
        most[0] = most[lane] > most[0] ? most[lane] : most[0];
        wrong[0] += wrong[lane];
    }
    return wrong[0] ? NAN : most[0];
}

/* The first of the largest of x[n], at temperature 0 the whole distribution; -1 where one is NaN or the largest is not finite. */
#define FIRST(NAME, REAL, COUNT)                                                                          \
    EACH_PROCESSOR static long NAME(const REAL *x, long n) {                                              \
        enum { LANES = 32 };                                                                              \
        REAL most[LANES], top = -INFINITY;                                                                \
        COUNT wrong[LANES] = {0}, any = 0;                                                                \
        long i = 0;                                                                                       \
        for (int lane = 0; lane < LANES; lane++) most[lane] = -INFINITY;                                  \
        for (; i + LANES <= n; i += LANES)                                                                \
            for (int lane = 0; lane < LANES; lane++) {                                                    \
                most[lane] = x[i + lane] > most[lane] ? x[i + lane] : most[lane];                         \
                wrong[lane] |= x[i + lane] != x[i + lane];                                                \
            }                                                                                             \
        for (; i < n; i++) top = x[i] > top ? x[i] : top, any |= x[i] != x[i];                            \
        for (int lane = 0; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top, any |= wrong[lane]; \
        if (any || !(top - top == 0)) return -1;                                                          \
        for (i = 0; i + LANES <= n; i += LANES) {                                                         \
            COUNT here = 0;                                                                               \
            for (int lane = 0; lane < LANES; lane++) here |= x[i + lane] == top;                          \
            if (here) break;                                                                              \
        }                                                                                                 \
        while (x[i] != top) i++;                                                                          \
        return i;                                                                                         \
    }
FIRST(first_float, float, int32_t)
FIRST(first_double, double, int64_t)

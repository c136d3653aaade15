/* The product in terms of one vector type; kernels.c includes this once for each kind of processor.
 *
 * Before it is included: SUFFIX, TARGET, VEC (floats a vector), V, LOAD, STORE, SET, ADD, FMA(a, b, c) = a b + c,
 * EVEN(from), ODD(from): the first or second of VEC pairs of bfloat16 as floats, MOST (rows of a slab), SOME(k): blocks at a
 * time for k rows. Or, where the processor multiplies pairs of bfloat16 itself, DOT(sum, weights, pair): then rows are bfloat16 too.
 *
 * The roofline decides: with one row each weight is used once, so a product is as fast as the weights arrive. Up to MOST
 * rows use a weight while it is in a register, so they cost hardly more than one. Every output is one accumulator that
 * runs over the inputs in their order, whatever stands beside it: the same row gives the same bits in any company.
 */
#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#define FN(name) CAT(name, SUFFIX)
#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 32")
enum { FN(PARTS_) = BLOCK / VEC };
#define PARTS FN(PARTS_)
#ifdef DOT
#define NUMBER uint16_t
#else
#define NUMBER float
#endif

/* The compiler sees that the same input or weight is read again soon and keeps it in a register that a sum needs, and the
 * sum goes to memory and back at every step: six rows took twice as long as five. It keeps nothing that a pointer leads to
 * whose value it does not know. With few sums there are registers for all. */
#define FORGET(pointer) \
    if (K * PARTS > 4) __asm__ volatile("" : "+r"(pointer))

/* How far on the weights stand that are asked for now: n inputs, and at the end of the blocks in the group that comes next.
 * What is read first there is no neighbour of what was read last, so the memory's own predictions come too late. */
#define SOON(n) ((n) * BLOCK + (i + (n) < w->in ? 0 : (G - 1) * step))

/* Weights are used once a pass: they need not push out of the larger caches what the rest of the program works with. */
#define ASK(address) __builtin_prefetch(address, 0, 0)

/* Sums of K rows and G blocks go to y: plus bias, plus what stands there. */
INLINE void FN(finish)(const int K, const int G, const Matrix *w, int block, V (*sum)[4 * PARTS], float *y, int ldy, int add) {
    if ((block + G) * BLOCK > w->out) { /* a block of which some outputs are none */
        float sums[MOST * 4 * BLOCK];
        UNROLL for (int k = 0; k < K; k++)
            UNROLL for (int g = 0; g < G * PARTS; g++) STORE(sums + (k * G * PARTS + g) * VEC, sum[k][g]);
        put(w, block, G, sums, K, y, ldy, add);
        return;
    }
    UNROLL for (int k = 0; k < K; k++)
        UNROLL for (int g = 0; g < G * PARTS; g++) {
            const int at = block * BLOCK + g * VEC;
            float *to = y + (size_t)k * ldy + at;
            const V v = w->bias ? ADD(sum[k][g], LOAD(w->bias + at)) : sum[k][g];
            STORE(to, add ? ADD(LOAD(to), v) : v);
        }
}

/* K rows against G neighbouring blocks. K and G are constants where this is inlined and every loop over them is unrolled,
 * so the sums live in registers: there are at most MOST * PARTS of them, or as many with G > 1. */
INLINE void FN(slab)(const int K, const int G, const Matrix *w, int block, const NUMBER *x, int ldx, float *y, int ldy, int add) {
    V sum[MOST][4 * PARTS];
    const size_t step = (size_t)w->in * BLOCK;
    UNROLL for (int k = 0; k < K; k++)
        UNROLL for (int g = 0; g < G * PARTS; g++) sum[k][g] = SET(0.0f);
#ifndef DOT
    if (w->format == FLOATS) {
        const float *from = (const float *)w->data + (size_t)block * step;
        for (int i = 0; i < w->in; i++, from += BLOCK) {
            const size_t soon = SOON(AHEAD);
            UNROLL for (int g = 0; g < G; g++) {
                V weight[PARTS];
                const float *column = x + i;
                FORGET(column);
                ASK(from + g * step + soon);
                UNROLL for (int p = 0; p < PARTS; p++) weight[p] = LOAD(from + g * step + p * VEC);
                UNROLL for (int k = 0; k < K; k++) {
                    const V input = SET(column[(size_t)k * ldx]);
                    UNROLL for (int p = 0; p < PARTS; p++)
                        sum[k][g * PARTS + p] = FMA(weight[p], input, sum[k][g * PARTS + p]);
                }
            }
        }
    } else
#endif
    {
        const uint16_t *from = (const uint16_t *)w->data + (size_t)block * step;
        for (int i = 0; i < w->in; i += 2, from += 2 * BLOCK) {
            const size_t soon = SOON(2 * AHEAD);
            UNROLL for (int g = 0; g < G; g++) {
                ASK(from + g * step + soon);
#ifdef DOT
                const uint16_t *column = x + i;
                FORGET(column);
                UNROLL for (int k = 0; k < K; k++)
                    UNROLL for (int p = 0; p < PARTS; p++)
                        sum[k][g * PARTS + p] =
                            DOT(sum[k][g * PARTS + p], from + g * step + 2 * p * VEC, column + (size_t)k * ldx);
#else
                UNROLL for (int odd = 0; odd < 2; odd++) {
                    V weight[PARTS];
                    const float *column = x + i + odd;
                    const uint16_t *pairs = from + g * step;
                    FORGET(column);
                    FORGET(pairs);
                    UNROLL for (int p = 0; p < PARTS; p++)
                        weight[p] = odd ? ODD(pairs + 2 * p * VEC) : EVEN(pairs + 2 * p * VEC);
                    UNROLL for (int k = 0; k < K; k++) {
                        const V input = SET(column[(size_t)k * ldx]);
                        UNROLL for (int p = 0; p < PARTS; p++)
                            sum[k][g * PARTS + p] = FMA(weight[p], input, sum[k][g * PARTS + p]);
                    }
                }
#endif
            }
        }
    }
    FN(finish)(K, G, w, block, sum, y, ldy, add);
}

#define SLAB(K)                                                                                                         \
    static TARGET void CAT(FN(one_), K)(const Matrix *w, int b, const NUMBER *x, int ldx, float *y, int ldy, int add) { \
        FN(slab)(K, 1, w, b, x, ldx, y, ldy, add);                                                                      \
    }                                                                                                                   \
    static TARGET void CAT(FN(some_), K)(const Matrix *w, int b, const NUMBER *x, int ldx, float *y, int ldy, int add) { \
        FN(slab)(K, SOME(K), w, b, x, ldx, y, ldy, add);                                                                \
    }
#define PAIR(K) {CAT(FN(one_), K), CAT(FN(some_), K)}
SLAB(1) SLAB(2) SLAB(3)
#if MOST > 3
SLAB(4) SLAB(5)
#endif
#if MOST > 5
SLAB(6)
#endif
#if MOST > 6
SLAB(7) SLAB(8) SLAB(9) SLAB(10) SLAB(11) SLAB(12)
#endif
#if MOST > 12
SLAB(13) SLAB(14) SLAB(15) SLAB(16) SLAB(17) SLAB(18) SLAB(19) SLAB(20) SLAB(21) SLAB(22) SLAB(23) SLAB(24)
#endif
static void (*const FN(slabs)[MOST + 1][2])(const Matrix *, int, const NUMBER *, int, float *, int, int) = {
    {0, 0}, PAIR(1), PAIR(2), PAIR(3),
#if MOST > 3
    PAIR(4), PAIR(5),
#endif
#if MOST > 5
    PAIR(6),
#endif
#if MOST > 6
    PAIR(7), PAIR(8), PAIR(9), PAIR(10), PAIR(11), PAIR(12),
#endif
#if MOST > 12
    PAIR(13), PAIR(14), PAIR(15), PAIR(16), PAIR(17), PAIR(18), PAIR(19), PAIR(20), PAIR(21), PAIR(22), PAIR(23), PAIR(24),
#endif
};

/* Blocks first..last-1 of y = x W' for any number of rows, as slabs of equal height; a block's weights serve them all. */
static void FN(product)(const Matrix *w, int first, int last, const NUMBER *x, int ldx, int rows, float *y, int ldy, int add) {
    const int slabs = (rows + MOST - 1) / MOST, tall = (rows + slabs - 1) / slabs;
    for (int b = first; b < last;) {
        const int wide = SOME(tall) <= last - b, step = wide ? SOME(tall) : 1;
        for (int s = 0, at = 0; s < slabs; s++) {
            const int k = (rows - at + slabs - s - 1) / (slabs - s);
            const NUMBER *from = x + (size_t)at * ldx;
            float *to = y + (size_t)at * ldy;
            if (!wide || SOME(k) == step)
                FN(slabs)[k][wide](w, b, from, ldx, to, ldy, add);
            else /* a lower slab would take other steps */
                for (int one = 0; one < step; one++) FN(slabs)[k][0](w, b + one, from, ldx, to, ldy, add);
            at += k;
        }
        b += step;
    }
}

#undef FORGET
#undef SOON
#undef ASK
#undef SLAB
#undef PAIR
#undef SOME

/* The kernels in terms of one vector type; kernels.c includes this once for each kind of processor.
 *
 * Before it is included: SUFFIX, NAME, TARGET, VEC (floats a vector), V, LOAD, STORE, SET, FMA(a, b, c) = a b + c,
 * ADD, MAX, TOTAL (the sum of a vector by a fixed tree), HALF(from): VEC bfloat16 as floats, CHAINS (sums at a time in attention),
 * EVEN(from), ODD(from): the first or second of VEC pairs of bfloat16 as floats, MOST (rows of a slab), SOME(k): blocks at a time for k rows.
 *
 * The roofline decides: with one row each weight is used once, so a product is as fast as the weights arrive. Up to MOST
 * rows use a weight while it is in a register, so they cost hardly more than one. Every output is one accumulator that
 * runs over the inputs in their order, whatever stands beside it: the same row gives the same bits in any company.
 */
#define CAT_(a, b) a##b
#define CAT(a, b) CAT_(a, b)
#define FN(name) CAT(name, SUFFIX)
#define INLINE static inline __attribute__((always_inline)) TARGET
enum { FN(PARTS_) = BLOCK / VEC };
#define PARTS FN(PARTS_)

/* What has been summed for one row and block goes to y: plus bias, plus what stands there already. */
INLINE void FN(put)(const Matrix *w, int block, const V *sum, float *y, int add) {
    const int at = block * BLOCK, n = w->out - at;
    if (n >= BLOCK) {
        _Pragma("GCC unroll 16") for (int p = 0; p < PARTS; p++) {
            V v = w->bias ? ADD(sum[p], LOAD(w->bias + at + p * VEC)) : sum[p];
            STORE(y + at + p * VEC, add ? ADD(LOAD(y + at + p * VEC), v) : v);
        }
        return;
    }
    float out[BLOCK];
    _Pragma("GCC unroll 16") for (int p = 0; p < PARTS; p++) STORE(out + p * VEC, sum[p]);
    for (int o = 0; o < n; o++) {
        float v = w->bias ? out[o] + w->bias[at + o] : out[o];
        y[at + o] = add ? y[at + o] + v : v;
    }
}

/* K rows against G neighbouring blocks. K and G are constants where this is inlined and every loop over them is unrolled,
 * so the sums live in registers: there are at most MOST * PARTS of them, or as many with G > 1. */
#define UNROLL _Pragma("GCC unroll 16")
INLINE void FN(slab)(const int K, const int G, const Matrix *w, int block, const float *x, int ldx, float *y, int ldy, int add) {
    V sum[MOST][4 * PARTS];
    const size_t step = (size_t)w->in * BLOCK;
    UNROLL for (int k = 0; k < K; k++)
        UNROLL for (int g = 0; g < G * PARTS; g++) sum[k][g] = SET(0.0f);
    if (!w->half) {
        const float *from = (const float *)w->data + (size_t)block * step;
        for (int i = 0; i < w->in; i++, from += BLOCK) {
            UNROLL for (int g = 0; g < G; g++) {
                V weight[PARTS];
                __builtin_prefetch(from + g * step + AHEAD * BLOCK);
                UNROLL for (int p = 0; p < PARTS; p++) weight[p] = LOAD(from + g * step + p * VEC);
                UNROLL for (int k = 0; k < K; k++) {
                    const V input = SET(x[(size_t)k * ldx + i]);
                    UNROLL for (int p = 0; p < PARTS; p++)
                        sum[k][g * PARTS + p] = FMA(weight[p], input, sum[k][g * PARTS + p]);
                }
            }
        }
    } else {
        const uint16_t *from = (const uint16_t *)w->data + (size_t)block * step;
        for (int i = 0; i < w->in; i += 2, from += 2 * BLOCK) {
            UNROLL for (int g = 0; g < G; g++) {
                V weight[PARTS];
                __builtin_prefetch(from + g * step + 2 * AHEAD * BLOCK);
                UNROLL for (int odd = 0; odd < 2; odd++) {
                    UNROLL for (int p = 0; p < PARTS; p++)
                        weight[p] = odd ? ODD(from + g * step + 2 * p * VEC) : EVEN(from + g * step + 2 * p * VEC);
                    UNROLL for (int k = 0; k < K; k++) {
                        const V input = SET(x[(size_t)k * ldx + i + odd]);
                        UNROLL for (int p = 0; p < PARTS; p++)
                            sum[k][g * PARTS + p] = FMA(weight[p], input, sum[k][g * PARTS + p]);
                    }
                }
            }
        }
    }
    UNROLL for (int k = 0; k < K; k++)
        UNROLL for (int g = 0; g < G; g++) {
            V part[PARTS];
            UNROLL for (int p = 0; p < PARTS; p++) part[p] = sum[k][g * PARTS + p];
            FN(put)(w, block + g, part, y + (size_t)k * ldy, add);
        }
}

#define SLAB(K)                                                                                                        \
    static TARGET void CAT(FN(one_), K)(const Matrix *w, int b, const float *x, int ldx, float *y, int ldy, int add) { \
        FN(slab)(K, 1, w, b, x, ldx, y, ldy, add);                                                                     \
    }                                                                                                                  \
    static TARGET void CAT(FN(some_), K)(const Matrix *w, int b, const float *x, int ldx, float *y, int ldy, int add) { \
        FN(slab)(K, SOME(K), w, b, x, ldx, y, ldy, add);                                                               \
    }
#define PAIR(K) {CAT(FN(one_), K), CAT(FN(some_), K)}
SLAB(1) SLAB(2) SLAB(3) SLAB(4) SLAB(5) SLAB(6)
#if MOST > 6
SLAB(7) SLAB(8) SLAB(9) SLAB(10) SLAB(11) SLAB(12)
#endif
static void (*const FN(slabs)[MOST + 1][2])(const Matrix *, int, const float *, int, float *, int, int) = {
    {0, 0}, PAIR(1), PAIR(2), PAIR(3), PAIR(4), PAIR(5), PAIR(6),
#if MOST > 6
    PAIR(7), PAIR(8), PAIR(9), PAIR(10), PAIR(11), PAIR(12),
#endif
};

/* Blocks first..last-1 of y = x W' for any number of rows, as slabs of equal height; a block's weights serve them all. */
static void FN(product)(const Matrix *w, int first, int last, const float *x, int ldx, int rows, float *y, int ldy, int add,
                        uint16_t *scratch) {
    (void)scratch;
    int slabs = (rows + MOST - 1) / MOST;
    for (int b = first; b < last;) {
        int tall = (rows + slabs - 1) / slabs, wide = SOME(tall) <= last - b;
        int step = wide ? SOME(tall) : 1;
        for (int s = 0, at = 0; s < slabs; s++) {
            int k = (rows - at + slabs - s - 1) / (slabs - s);
            const float *from = x + (size_t)at * ldx;
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

/* exp by Cephes' reduction and polynomial, about 2 ulp; without branches, so that a loop over it becomes vectors. */
INLINE float FN(exp)(float x) {
    union {
        float f;
        int32_t i;
    } z, scale;
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    z.f = x * 1.44269504f + 12582912.0f; /* the nearest integer, in the low bits */
    float n = z.f - 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    scale.i = (z.i - 0x4b400000 + 127) << 23;
    return (p * r * r + r + 1.0f) * scale.f;
}

/* h = silu(h), or GPT-2's gelu (tanh form); times `up` where there is a gate. */
static TARGET void FN(activate)(float *h, const float *up, int n, int silu) {
    if (silu)
        for (int i = 0; i < n; i++) h[i] = h[i] / (1.0f + FN(exp)(-h[i]));
    else
        for (int i = 0; i < n; i++) /* x (1 + tanh u) / 2 = x / (1 + exp(-2 u)) */
            h[i] = h[i] / (1.0f + FN(exp)(-1.5957691216f * (h[i] + 0.044715f * h[i] * h[i] * h[i])));
    if (up)
        for (int i = 0; i < n; i++) h[i] *= up[i];
}

/* VEC numbers of a key or value, from number i on; `half`: they are stored as bfloat16. One number: */
INLINE V FN(some_of)(const char *p, int i, const int half) {
    return half ? HALF((const uint16_t *)p + i) : LOAD((const float *)p + i);
}
INLINE float FN(one_of)(const char *p, int i, const int half) {
    return half ? widen(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

/* q . k, summed in VEC lanes, these by a fixed tree, then what is left over: the order depends on the width alone. */
INLINE float FN(dot)(const float *q, const char *k, int width, const int half) {
    V sum = SET(0.0f);
    int i = 0;
    for (; i + VEC <= width; i += VEC) sum = FMA(LOAD(q + i), FN(some_of)(k, i, half), sum);
    float total = TOTAL(sum);
    for (; i < width; i++) total += q[i] * FN(one_of)(k, i, half);
    return total;
}

/* e[0..n-1] = exp(e - max e); returns their sum, in VEC lanes by index. */
INLINE float FN(soft)(float *e, int n) {
    V high = SET(e[0]), sum = SET(0.0f);
    int j = 0;
    for (; j + VEC <= n; j += VEC) high = MAX(LOAD(e + j), high);
    float lane[VEC], most;
    STORE(lane, high);
    most = lane[0];
    for (int l = 1; l < VEC; l++) most = lane[l] > most ? lane[l] : most;
    for (; j < n; j++) most = e[j] > most ? e[j] : most;
    for (j = 0; j < n; j++) e[j] = FN(exp)(e[j] - most);
    for (j = 0; j + VEC <= n; j += VEC) sum = ADD(LOAD(e + j), sum);
    float total = TOTAL(sum);
    for (; j < n; j++) total += e[j];
    return total;
}

/* Keys or values that stand `line` bytes apart: number j at slot list[j], or at slot j where there is no list. */
typedef struct {
    const char *base;
    const int *list;
    size_t line;
    int count;
} FN(Run);
#define PLACE(run, j) ((run)->base + (size_t)((run)->list ? (run)->list[j] : (j)) * (run)->line)

INLINE void FN(add_scores)(const Stack *s, const FN(Run) *run, const int half, const float *q, float *scores, int n) {
    for (int j = 0; j < run->count; j++)
        for (int g = 0; g < s->heads / s->shared; g++)
            scores[(size_t)g * n + j] = FN(dot)(q + g * s->width, PLACE(run, j), s->width, half) * s->scale;
}

INLINE void FN(add_values)(const Stack *s, const FN(Run) *run, const int half, const float *scores, int n, float *out) {
    for (int g = 0; g < s->heads / s->shared; g++) {
        const float *e = scores + (size_t)g * n;
        float *o = out + g * s->width;
        int i = 0;
        for (; i + CHAINS * VEC <= s->width; i += CHAINS * VEC) {
            V sum[CHAINS];
            UNROLL for (int c = 0; c < CHAINS; c++) sum[c] = LOAD(o + i + c * VEC);
            for (int j = 0; j < run->count; j++)
                UNROLL for (int c = 0; c < CHAINS; c++)
                    sum[c] = FMA(SET(e[j]), FN(some_of)(PLACE(run, j), i + c * VEC, half), sum[c]);
            UNROLL for (int c = 0; c < CHAINS; c++) STORE(o + i + c * VEC, sum[c]);
        }
        for (; i < s->width; i++)
            for (int j = 0; j < run->count; j++) o[i] += e[j] * FN(one_of)(PLACE(run, j), i, half);
    }
}

/* The attention of one row in one key/value head, for the query heads that share it.
 *
 * q, out [heads / shared, width]. Keys come in the order of the row's own path: the probe prefix, slots 0..prefix-1, then
 * seen[0..extra-1]. scores has room for (heads / shared) * (lead + prefix + extra) floats.
 */
static TARGET void FN(attend)(const Stack *s, const Row *row, int layer, int head, const int *seen, int prefix, int extra,
                              const float *q, float *out, float *scores) {
    const int width = s->width, group = s->heads / s->shared, n = row->lead + prefix + extra;
    const size_t line = (size_t)width * (s->half ? 2 : 4), plane = (size_t)row->capacity * line;
    const char *keys = row->cache + ((size_t)(2 * layer) * s->shared + head) * plane, *values = keys + s->shared * plane;
    const size_t lead = ((size_t)layer * s->shared + head) * row->lead * width;
    FN(Run) first = {(const char *)(row->lead_keys + lead), NULL, width * sizeof(float), row->lead};
    FN(Run) then = {keys, NULL, line, prefix}, last = {keys, seen, line, extra};
    float total[group], *at = scores + row->lead;
    if (row->lead) FN(add_scores)(s, &first, 0, q, scores, n);
    if (s->half) {
        FN(add_scores)(s, &then, 1, q, at, n);
        FN(add_scores)(s, &last, 1, q, at + prefix, n);
    } else {
        FN(add_scores)(s, &then, 0, q, at, n);
        FN(add_scores)(s, &last, 0, q, at + prefix, n);
    }
    for (int g = 0; g < group; g++) total[g] = FN(soft)(scores + (size_t)g * n, n);
    for (int i = 0; i < group * width; i++) out[i] = 0.0f;
    first.base = (const char *)(row->lead_values + lead), then.base = last.base = values;
    if (row->lead) FN(add_values)(s, &first, 0, scores, n, out);
    if (s->half) {
        FN(add_values)(s, &then, 1, at, n, out);
        FN(add_values)(s, &last, 1, at + prefix, n, out);
    } else {
        FN(add_values)(s, &then, 0, at, n, out);
        FN(add_values)(s, &last, 0, at + prefix, n, out);
    }
    for (int g = 0; g < group; g++)
        for (int i = 0; i < width; i++) out[g * width + i] /= total[g];
}

static const Kernel FN(kernel) = {NAME, MOST, 0, FN(product), FN(attend), FN(activate)};

#undef CAT_
#undef CAT
#undef FN
#undef INLINE
#undef PARTS
#undef SLAB
#undef PAIR
#undef SUFFIX
#undef TARGET
#undef NAME
#undef VEC
#undef V
#undef LOAD
#undef STORE
#undef SET
#undef FMA
#undef EVEN
#undef HALF
#undef ADD
#undef MAX
#undef TOTAL
#undef CHAINS
#undef PLACE
#undef ODD
#undef UNROLL
#undef SOME
#undef MOST

/* Attention and activation in terms of one vector type; kernels.c includes this after slab.h, whose FN, V, LOAD and the like
 * it uses, with MAX, ADD, TOTAL (the sum of a vector by a fixed tree), HALF(from): VEC bfloat16 as floats, and CHAINS (sums at a time).
 *
 * As in the product, the order of every sum depends on the row's own path and on the model's shape alone.
 */
/* exp by Cephes' reduction and polynomial, about 2 ulp; without branches, so that a loop over it becomes vectors. */
INLINE float FN(exp)(float x) {
    union {
        float f;
        uint32_t i; /* what comes of a NaN may overflow; it is a NaN all the same */
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
    scale.i = (z.i - 0x4b400000u + 127u) << 23;
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
    FN(Run) first = {row->lead ? (const char *)(row->lead_keys + lead) : NULL, NULL, width * sizeof(float), row->lead};
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
    then.base = last.base = values;
    if (row->lead) {
        first.base = (const char *)(row->lead_values + lead);
        FN(add_values)(s, &first, 0, scores, n, out);
    }
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

#undef CAT_
#undef CAT
#undef FN
#undef INLINE
#undef UNROLL
#undef PARTS
#undef SUFFIX
#undef TARGET
#undef VEC
#undef V
#undef LOAD
#undef STORE
#undef SET
#undef FMA
#undef EVEN
#undef ODD
#undef HALF
#undef ADD
#undef MAX
#undef TOTAL
#undef CHAINS
#undef PLACE

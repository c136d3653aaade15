/* Attention and activation in terms of one vector type; kernels.c includes this after slab.h, whose FN, V, LOAD and the like
 * it uses, with MAX, ADD, TOTAL (the sum of a vector by a fixed tree), TOTALS (of four, each by the same, times a number),
 * MANY keys at a time and their TOTALS_MANY, HALF(from): VEC bfloat16 as floats, and CHAINS (sums at a time).
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

/* The same for FOUR or MANY keys, whose lanes are added up together, times `scale`. */
enum { FN(FOUR) = 4 };
INLINE void FN(dots)(const int keys, const float *q, const char *const *k, const int width, const int half, float scale,
                     float *to) {
    V sum[MANY];
    UNROLL for (int c = 0; c < keys; c++) sum[c] = SET(0.0f);
    int i = 0;
    for (; i + VEC <= width; i += VEC)
        UNROLL for (int c = 0; c < keys; c++) sum[c] = FMA(LOAD(q + i), FN(some_of)(k[c], i, half), sum[c]);
    const float by = i == width ? scale : 1.0f;
    if (keys == FN(FOUR))
        TOTALS(to, sum, by);
    else
        TOTALS_MANY(to, sum, by);
    if (i == width) return;
    for (; i < width; i++)
        for (int c = 0; c < keys; c++) to[c] += q[i] * FN(one_of)(k[c], i, half);
    for (int c = 0; c < keys; c++) to[c] *= scale;
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

/* One query head of one row: where its query, its scores of this run, and its output stand. */
typedef struct {
    const float *q;
    float *scores, *out;
} FN(Query);

/* Scores of the next keys of a run. What several queries look at is widened once, for all of them. */
INLINE void FN(scores)(const int keys, const Stack *s, const char **k, const int half, const FN(Query) *query, int queries,
                       int at) {
    const int width = s->width, widened = half && queries > 1;
    float wide[widened ? keys * width : 1];
    for (int c = 0; widened && c < keys; c++) {
        int i = 0;
        for (; i + VEC <= width; i += VEC) STORE(wide + c * width + i, FN(some_of)(k[c], i, 1));
        for (; i < width; i++) wide[c * width + i] = FN(one_of)(k[c], i, 1);
        k[c] = (const char *)(wide + c * width);
    }
    for (int n = 0; n < queries; n++) {
        float *to = query[n].scores + at;
        if (keys == 1)
            *to = FN(dot)(query[n].q, *k, width, half && !widened) * s->scale;
        else if (half && !widened)
            FN(dots)(keys, query[n].q, k, width, 1, s->scale, to);
        else if (width == 64) /* most models; known, the loop is unrolled */
            FN(dots)(keys, query[n].q, k, 64, 0, s->scale, to);
        else
            FN(dots)(keys, query[n].q, k, width, 0, s->scale, to);
    }
}

INLINE void FN(add_scores)(const Stack *s, const FN(Run) *run, const int half, const FN(Query) *query, int queries) {
    for (int j = 0; j < run->count;) {
        const int left = run->count - j, keys = left >= MANY ? MANY : left >= FN(FOUR) ? FN(FOUR) : 1;
        const char *k[MANY];
        for (int c = 0; c < keys; c++) k[c] = PLACE(run, j + c);
        if (keys == MANY)
            FN(scores)(MANY, s, k, half, query, queries, j);
        else if (keys == FN(FOUR))
            FN(scores)(FN(FOUR), s, k, half, query, queries, j);
        else
            FN(scores)(1, s, k, half, query, queries, j);
        j += keys;
    }
}

/* out += the run's values, weighed by the scores of up to three queries, for which a value is widened once. From number i
 * on, `chains` vectors at a time; returns the first number that is left. Which go together changes no sum. */
INLINE int FN(columns)(const Stack *s, const FN(Run) *run, const int half, const FN(Query) *query, const int queries, int i,
                       const int chains) {
    for (; i + chains * VEC <= s->width; i += chains * VEC) {
        V sum[3][CHAINS];
        UNROLL for (int n = 0; n < queries; n++)
            UNROLL for (int c = 0; c < chains; c++) sum[n][c] = LOAD(query[n].out + i + c * VEC);
        for (int j = 0; j < run->count; j++) {
            const char *value = PLACE(run, j);
            UNROLL for (int c = 0; c < chains; c++) {
                V v = FN(some_of)(value, i + c * VEC, half);
                UNROLL for (int n = 0; n < queries; n++) sum[n][c] = FMA(SET(query[n].scores[j]), v, sum[n][c]);
            }
        }
        UNROLL for (int n = 0; n < queries; n++)
            UNROLL for (int c = 0; c < chains; c++) STORE(query[n].out + i + c * VEC, sum[n][c]);
    }
    return i;
}

INLINE void FN(weigh)(const Stack *s, const FN(Run) *run, const int half, const FN(Query) *query, const int queries) {
    int i = FN(columns)(s, run, half, query, queries, 0, CHAINS);
    i = FN(columns)(s, run, half, query, queries, i, 1);
    for (; i < s->width; i++)
        for (int n = 0; n < queries; n++)
            for (int j = 0; j < run->count; j++)
                query[n].out[i] += query[n].scores[j] * FN(one_of)(PLACE(run, j), i, half);
}

INLINE void FN(add_values)(const Stack *s, const FN(Run) *run, const int half, const FN(Query) *query, int queries) {
    int n = 0;
    for (; n + 3 <= queries; n += 3) FN(weigh)(s, run, half, query + n, 3);
    if (queries - n == 2) FN(weigh)(s, run, half, query + n, 2);
    if (queries - n == 1) FN(weigh)(s, run, half, query + n, 1);
}

/* Keys (values: 0) of a run for some queries, and move their scores on behind it. */
INLINE void FN(pass)(const Stack *s, FN(Run) run, const int half, FN(Query) *query, int queries, int values) {
    if (!run.count) return;
    if (values)
        FN(add_values)(s, &run, half, query, queries);
    else
        FN(add_scores)(s, &run, half, query, queries);
    for (int n = 0; n < queries; n++) query[n].scores += run.count;
}

/* The attention of some rows of one text in one key/value head, for the query heads that share it.
 *
 * Keys come in the order of each row's own path: the probe prefix (a row that has one comes alone), slots 0..prefix-1, then
 * its further slots. What all rows begin with is gone through once for all of them; as every sum goes on where it stood, no bit
 * depends on who comes together. scores has room for `room` floats a query.
 */
static TARGET void FN(attend)(const Stack *s, const Row *row, const Sees *sees, int rows, int layer, int head, const float *q,
                              size_t ldq, float *out, float *scores, size_t room) {
    const int width = s->width, group = s->heads / s->shared, queries = rows * group;
    const size_t line = (size_t)width * (s->half ? 2 : 4), plane = (size_t)row->capacity * line;
    const char *keys = row->cache + ((size_t)(2 * layer) * s->shared + head) * plane;
    const size_t lead = ((size_t)layer * s->shared + head) * row->lead * width;
    FN(Query) query[queries];
    int common = sees[0].prefix;
    for (int r = 1; r < rows; r++) common = sees[r].prefix < common ? sees[r].prefix : common;
    for (int values = 0; values < 2; values++) {
        const char *base = keys + (values ? s->shared * plane : 0);
        const float *first = values ? row->lead_values : row->lead_keys;
        for (int n = 0; n < queries; n++)
            query[n] = (FN(Query)){q + n / group * ldq + (size_t)(n % group) * width, scores + (size_t)n * room,
                                   out + ((size_t)(n / group) * s->heads + n % group) * width};
        if (values)
            for (int n = 0; n < queries; n++) {
                for (int i = 0; i < width; i++) query[n].out[i] = 0.0f;
            }
        if (row->lead) {
            FN(Run) run = {(const char *)(first + lead), NULL, width * sizeof(float), row->lead};
            FN(pass)(s, run, 0, query, queries, values);
        }
        FN(Run) together = {base, NULL, line, common};
        if (s->half)
            FN(pass)(s, together, 1, query, queries, values);
        else
            FN(pass)(s, together, 0, query, queries, values);
        for (int r = 0; r < rows; r++) {
            FN(Run) rest = {base + (size_t)common * line, NULL, line, sees[r].prefix - common};
            FN(Run) last = {base, sees[r].extra, line, sees[r].count};
            if (s->half) {
                FN(pass)(s, rest, 1, query + r * group, group, values);
                FN(pass)(s, last, 1, query + r * group, group, values);
            } else {
                FN(pass)(s, rest, 0, query + r * group, group, values);
                FN(pass)(s, last, 0, query + r * group, group, values);
            }
        }
        for (int n = 0; n < queries; n++) {
            const Sees *own = sees + n / group;
            float *e = scores + (size_t)n * room;
            if (!values)
                e[room - 1] = FN(soft)(e, row->lead + own->prefix + own->count);
            else
                for (int i = 0; i < width; i++) query[n].out[i] /= e[room - 1];
        }
    }
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
#undef TOTALS
#undef TOTALS_MANY
#undef MANY
#undef CHAINS
#undef PLACE

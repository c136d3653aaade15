/* Attention in terms of one vector type; kernels.c includes this after slab.h and rowwise.h, whose FN, V, LOAD and the like it
 * uses, with TRANSPOSE (VEC vectors of VEC words), HALF(from): VEC bfloat16 as floats, CHAINS (sums at a time), and BESIDE
 * (queries that a value is weighed for at a time).
 *
 * As in the product, the order of every sum depends on the row's own path and on the model's shape alone.
 */
/* VEC numbers of a key or value, from number i on; `half`: they are stored as bfloat16. One number: */
INLINE V FN(some_of)(const char *p, int i, const int half) {
    return half ? HALF((const uint16_t *)p + i) : LOAD((const float *)p + i);
}
INLINE float FN(one_of)(const char *p, int i, const int half) {
    return half ? widen(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

/* Keys or values that stand `line` bytes apart: number j at slot list[j], or at slot j where there is no list. */
typedef struct {
    const char *base;
    const int *list;
    size_t line;
    int count;
} FN(Run);
#define SOON_AFTER(from, line) \
    for (size_t z_ = 0; z_ < (line); z_ += 64) __builtin_prefetch((from) + LATER * (line) + z_)
#define PLACE(run, j) ((run)->base + (size_t)((run)->list ? (run)->list[j] : (j)) * (run)->line)

/* One query head of one row: where its query, its scores of this run, and its output stand; `pairs`: the query or the scores
 * in bfloat16, where the kernel takes pairs of these. */
typedef struct {
    const float *q;
    float *scores, *out;
    const uint16_t *pairs;
} FN(Query);

/* VEC keys transposed: each vector of `tile` holds one number of all of them (two, where they are bfloat16). So no lanes need
 * be added up, and what that costs is shared by all queries. */
INLINE void FN(transpose)(const char *const *key, const int width, const int half, float *tile) {
    const int words = half ? width / 2 : width;
    int i = 0;
    for (; i + VEC <= words; i += VEC, tile += VEC * VEC) {
        V word[VEC];
        UNROLL for (int c = 0; c < VEC; c++) word[c] = LOAD((const float *)key[c] + i);
        TRANSPOSE(word);
        UNROLL for (int c = 0; c < VEC; c++) STORE(tile + c * VEC, word[c]);
    }
    for (; i < words; i++)
        for (int c = 0; c < VEC; c++) memcpy(tile++, key[c] + i * sizeof(float), sizeof(float));
    if (half && width % 2)
        for (int c = 0; c < VEC; c++) memcpy(tile++, key[c] + (width - 1) * sizeof(uint16_t), sizeof(uint16_t));
}

/* What has been summed for some keys, scaled: their scores. */
INLINE void FN(keep)(const Stack *s, V sum, float *to, int keys) {
    float score[VEC];
    STORE(keys == VEC ? to : score, FMA(sum, SET(s->scale), SET(0.0f)));
    if (keys < VEC)
        for (int c = 0; c < keys; c++) to[c] = score[c];
}

/* Scores of these keys for some queries. Numbers at even places are summed in their order, those at odd places in theirs. */
enum { FN(QUERIES) = VEC == 4 ? 3 : 6 }; /* what registers there are for */
INLINE void FN(against)(const Stack *s, const float *tile, const int half, const FN(Query) *query, const int queries, int at,
                        int keys) {
    const int width = s->width;
    V even[FN(QUERIES)], odd[FN(QUERIES)];
    const float *q[FN(QUERIES)];
    UNROLL for (int n = 0; n < queries; n++) even[n] = odd[n] = SET(0.0f), q[n] = query[n].q;
    for (int i = 0; i + 2 <= width; i += 2, tile += half ? VEC : 2 * VEC) {
        const V first = half ? EVEN((const uint16_t *)tile) : LOAD(tile);
        const V second = half ? ODD((const uint16_t *)tile) : LOAD(tile + VEC);
        UNROLL for (int n = 0; n < queries; n++) {
            even[n] = FMA(first, SET(q[n][i]), even[n]);
            odd[n] = FMA(second, SET(q[n][i + 1]), odd[n]);
        }
    }
    const V last = width % 2 == 0 ? SET(0.0f) : half ? EVEN((const uint16_t *)tile) : LOAD(tile);
    UNROLL for (int n = 0; n < queries; n++) {
        if (width % 2) even[n] = FMA(last, SET(q[n][width - 1]), even[n]);
        FN(keep)(s, ADD(even[n], odd[n]), query[n].scores + at, keys);
    }
}
#ifdef DOT
#include "pairs.h"
#endif

/* Keys made ready for queries, and the queries' scores: for the kind of keys that the cache holds. */
INLINE void FN(ready)(const Stack *s, const char *const *key, const int half, float *tile) {
#ifdef DOT
    if (half) {
        FN(quarters)(key, s->width, tile);
        return;
    }
#endif
    FN(transpose)(key, s->width, half, tile);
}
INLINE void FN(score)(const Stack *s, const float *tile, const int half, const FN(Query) *query, const int queries, int at,
                      int keys) {
#ifdef DOT
    if (half) {
        FN(against_pairs)(s, tile, query, queries, at, keys);
        return;
    }
#endif
    FN(against)(s, tile, half, query, queries, at, keys);
}

INLINE void FN(add_scores)(const Stack *s, const FN(Run) *run, const int half, const FN(Query) *query, int queries) {
    float tile[(s->width + 32) * VEC];
    for (int at = 0, n = 0; at < run->count; at += VEC, n = 0) {
        const int keys = run->count - at < VEC ? run->count - at : VEC;
        const char *key[VEC];
        for (int c = 0; c < keys; c++) {
            key[c] = PLACE(run, at + c);
            SOON_AFTER(key[c], run->line);
        }
        for (int c = keys; c < VEC; c++) key[c] = key[0]; /* its scores are not kept */
        FN(ready)(s, key, half, tile);
        for (; n + FN(QUERIES) <= queries; n += FN(QUERIES))
            FN(score)(s, tile, half, query + n, FN(QUERIES), at, keys);
        for (; n + 3 <= queries; n += 3) FN(score)(s, tile, half, query + n, 3, at, keys);
        for (; n < queries; n++) FN(score)(s, tile, half, query + n, 1, at, keys);
    }
}

/* out += the run's values, weighed by the scores of up to BESIDE queries, for which a value is widened once. From number i
 * on, `chains` vectors at a time; returns the first number that is left. Which go together changes no sum. */
INLINE int FN(columns)(const Stack *s, const FN(Run) *run, const int half, const FN(Query) *query, const int queries, int i,
                       const int chains) {
    for (; i + chains * VEC <= s->width; i += chains * VEC) {
        V sum[BESIDE][CHAINS];
        UNROLL for (int n = 0; n < queries; n++)
            UNROLL for (int c = 0; c < chains; c++) sum[n][c] = LOAD(query[n].out + i + c * VEC);
        for (int j = 0; j < run->count; j++) {
            const char *value = PLACE(run, j);
            SOON_AFTER(value, run->line);
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
    int i = 0;
#ifdef DOT
    if (half) {
        for (; s->width - i > 2 * VEC; i += 4 * VEC) FN(weigh_pairs)(s, run, query, queries, i, 2);
        if (i < s->width) FN(weigh_pairs)(s, run, query, queries, i, 1);
        return;
    }
#endif
    i = FN(columns)(s, run, half, query, queries, i, CHAINS);
    if (CHAINS > 2) i = FN(columns)(s, run, half, query, queries, i, 2);
    i = FN(columns)(s, run, half, query, queries, i, 1);
    for (; i < s->width; i++)
        for (int n = 0; n < queries; n++)
            for (int j = 0; j < run->count; j++)
                query[n].out[i] += query[n].scores[j] * FN(one_of)(PLACE(run, j), i, half);
}

INLINE void FN(add_values)(const Stack *s, const FN(Run) *run, const int half, const FN(Query) *query, int queries) {
    int n = 0;
    for (; n + BESIDE <= queries; n += BESIDE) FN(weigh)(s, run, half, query + n, BESIDE);
    for (; n + 3 <= queries; n += 3) FN(weigh)(s, run, half, query + n, 3);
    for (; n < queries; n++) FN(weigh)(s, run, half, query + n, 1);
}

/* Keys (values: 0) of a run for some queries, and move their scores on after it. */
INLINE void FN(pass)(const Stack *s, FN(Run) run, const int half, FN(Query) *query, int queries, int values) {
    if (!run.count) return;
    if (values)
        FN(add_values)(s, &run, half, query, queries);
    else
        FN(add_scores)(s, &run, half, query, queries);
    for (int n = 0; n < queries; n++) {
        query[n].scores += run.count;
        if (values && half) query[n].pairs += run.count;
    }
}

/* What a row sees from slot `from` of its prefix on, as a list, a part of even length at a time. */
INLINE void FN(rest)(const Stack *s, const char *base, size_t line, const Sees *sees, int from, FN(Query) *query, int queries,
                     int values) {
    enum { PART = 64 };
    for (int slot[PART], end = sees->prefix + sees->count; from < end;) {
        int n = 0;
        for (; n < PART && from < end; n++, from++) slot[n] = from < sees->prefix ? from : sees->extra[from - sees->prefix];
        const FN(Run) run = {base, slot, line, n};
        if (s->half)
            FN(pass)(s, run, 1, query, queries, values);
        else
            FN(pass)(s, run, 0, query, queries, values);
    }
}

/* The attention of some rows of one text in one key/value head, for the query heads that share it.
 *
 * Keys come in the order of each row's own path: the probe prefix (a row that has one comes alone), slots 0..prefix-1, then
 * its further slots. What all rows begin with is gone through once for all of them; as every sum goes on where it stood, no bit
 * depends on who comes together. scores has room for `room` floats a query.
 */
static TARGET void FN(attend)(const Stack *s, const Row *row, const Sees *sees, int rows, int layer, int head, const float *q,
                              size_t ldq, float *out, float *scores, size_t room) {
    const int width = s->width, group = s->heads / s->shared, queries = rows * group, padded = (width + 8) & ~7;
    const size_t line = (size_t)width * (s->half ? 2 : 4), plane = (size_t)row->capacity * line;
    const char *keys = row->cache + ((size_t)(2 * layer) * s->shared + head) * plane;
    const size_t lead = ((size_t)layer * s->shared + head) * row->lead * width;
    FN(Query) query[queries];
    uint16_t rounded[s->half ? queries * padded : 1];
    int common = sees[0].prefix;
    for (int r = 1; r < rows; r++) common = sees[r].prefix < common ? sees[r].prefix : common;
    common &= ~1; /* pairs are not torn apart */
    for (int values = 0; values < 2; values++) {
        const char *base = keys + (values ? s->shared * plane : 0);
        const float *first = values ? row->lead_values : row->lead_keys;
        for (int n = 0; n < queries; n++) {
            float *e = scores + (size_t)n * room;
            const float *own = q + n / group * ldq + (size_t)(n % group) * width;
            uint16_t *pairs = values ? (uint16_t *)(e + row->lead) : rounded + (s->half ? n * padded : 0);
            query[n] = (FN(Query)){own, e, out + ((size_t)(n / group) * s->heads + n % group) * width, pairs};
            if (values)
                for (int i = 0; i < width; i++) query[n].out[i] = 0.0f;
#ifdef DOT
            const int count = values ? sees[n / group].prefix + sees[n / group].count : width;
            if (s->half) {
                FN(round)(values ? e + row->lead : own, count, pairs);
                memset(pairs + count, 0, (values ? 1 : padded - width) * sizeof *pairs); /* what the last one comes with */
            }
#endif
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
        for (int r = 0; r < rows; r++) FN(rest)(s, base, line, sees + r, common, query + r * group, group, values);
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
#undef FUSE
#undef ADD
#undef MUL
#undef MAX
#undef TOTAL
#undef TRANSPOSE
#undef BESIDE
#undef CHAINS
#undef PLACE
#undef DOT
#undef NUMBER
#undef MOST
#undef SOON_AFTER

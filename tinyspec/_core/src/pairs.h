/* Attention over bfloat16 keys and values where the processor multiplies pairs of them: half the steps. attend.h includes this
 * where there is DOT.
 *
 * Queries and weights are rounded to bfloat16, as the rows of a product are; sums are floats, that of the weights too. A
 * weight's partner is its neighbour in the row's own path, whoever else is served: every run is of even length, but for the
 * last of a path.
 */

enum { FN(WORDS) = 2 * VEC }; /* bfloat16 of a vector */

/* Numbers first..first+WORDS-1 of a key or value; those after its end are zero. */
INLINE __m512i FN(some_pairs)(const char *from, int first, int width) {
    const int left = width - first;
    return _mm512_maskz_loadu_epi16(left < FN(WORDS) ? (1u << left) - 1 : ~0u, (const uint16_t *)from + first);
}

/* Sixteen keys in quarters of a vector: in tile[t][i], numbers 8 t to 8 t + 7 of keys i, i + 4, i + 8 and i + 12. */
INLINE void FN(quarters)(const char *const *key, const int width, float *tile) {
    for (int first = 0; first < width; first += FN(WORDS), tile += 4 * 4 * VEC)
        UNROLL for (int i = 0; i < 4; i++) {
            const __m512i a = FN(some_pairs)(key[i], first, width), b = FN(some_pairs)(key[i + 4], first, width);
            const __m512i c = FN(some_pairs)(key[i + 8], first, width), d = FN(some_pairs)(key[i + 12], first, width);
            const __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), ab2 = _mm512_shuffle_i32x4(a, b, 0xee);
            const __m512i cd = _mm512_shuffle_i32x4(c, d, 0x44), cd2 = _mm512_shuffle_i32x4(c, d, 0xee);
            _mm512_storeu_si512(tile + (0 * 4 + i) * VEC, _mm512_shuffle_i32x4(ab, cd, 0x88));
            _mm512_storeu_si512(tile + (1 * 4 + i) * VEC, _mm512_shuffle_i32x4(ab, cd, 0xdd));
            _mm512_storeu_si512(tile + (2 * 4 + i) * VEC, _mm512_shuffle_i32x4(ab2, cd2, 0x88));
            _mm512_storeu_si512(tile + (3 * 4 + i) * VEC, _mm512_shuffle_i32x4(ab2, cd2, 0xdd));
        }
}

/* Scores of sixteen keys for some queries. Every fourth pair of a key is summed in its order: four sums, added two by two. */
INLINE void FN(against_pairs)(const Stack *s, const float *tile, const FN(Query) *query, const int queries, int at, int keys) {
    const uint16_t *q[FN(QUERIES)];
    V sum[FN(QUERIES)][4];
    UNROLL for (int n = 0; n < queries; n++) {
        q[n] = query[n].pairs;
        UNROLL for (int i = 0; i < 4; i++) sum[n][i] = SET(0.0f);
    }
    for (int first = 0; first < s->width; first += 8, tile += 4 * VEC) {
        __m512bh four[4];
        UNROLL for (int i = 0; i < 4; i++) four[i] = (__m512bh)_mm512_loadu_si512(tile + i * VEC);
        UNROLL for (int n = 0; n < queries; n++) {
            const __m512bh all = (__m512bh)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(q[n] + first)));
            UNROLL for (int i = 0; i < 4; i++) sum[n][i] = _mm512_dpbf16_ps(sum[n][i], four[i], all);
        }
    }
    UNROLL for (int n = 0; n < queries; n++) {
        const V *v = sum[n];
        const V a = ADD(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
        const V b = ADD(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
        FN(keep)(s, ADD(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee)), query[n].scores + at, keys);
    }
}

/* out += the run's values, weighed for some queries: 32 numbers, `wide` times, of which the last may be fewer; from i on. Two
 * values are put side by side once for all queries. */
INLINE void FN(weigh_pairs)(const Stack *s, const FN(Run) *run, const FN(Query) *query, const int queries, int i,
                            const int wide) {
    static const uint16_t low[FN(WORDS)] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i first = _mm512_loadu_si512(low), second = _mm512_add_epi16(first, _mm512_set1_epi16(VEC));
    const int left = s->width - i - (wide - 1) * FN(WORDS);
    const __mmask32 numbers = left < FN(WORDS) ? (1u << left) - 1 : ~0u;
    V sum[BESIDE][4];
    UNROLL for (int n = 0; n < queries; n++)
        UNROLL for (int c = 0; c < 2 * wide; c++)
            sum[n][c] = _mm512_maskz_loadu_ps(c < 2 * wide - 2 ? 0xffff : numbers >> c % 2 * VEC, query[n].out + i + c * VEC);
    for (int j = 0; j < run->count; j += 2) {
        const int both = j + 1 < run->count;
        const uint16_t *a = (const uint16_t *)PLACE(run, j) + i, *b = both ? (const uint16_t *)PLACE(run, j + 1) + i : a;
        SOON_AFTER((const char *)a, run->line);
        SOON_AFTER((const char *)b, run->line);
        UNROLL for (int t = 0; t < wide; t++) {
            const __mmask32 some = t < wide - 1 ? ~0u : numbers;
            const __m512i one = _mm512_maskz_loadu_epi16(some, a + t * FN(WORDS));
            const __m512i next = _mm512_maskz_loadu_epi16(both ? some : 0, b + t * FN(WORDS));
            const __m512bh lower = (__m512bh)_mm512_permutex2var_epi16(one, first, next);
            const __m512bh upper = (__m512bh)_mm512_permutex2var_epi16(one, second, next);
            UNROLL for (int n = 0; n < queries; n++) {
                sum[n][2 * t] = dot(sum[n][2 * t], lower, query[n].pairs + j);
                sum[n][2 * t + 1] = dot(sum[n][2 * t + 1], upper, query[n].pairs + j);
            }
        }
    }
    UNROLL for (int n = 0; n < queries; n++)
        UNROLL for (int c = 0; c < 2 * wide; c++)
            _mm512_mask_storeu_ps(query[n].out + i + c * VEC, c < 2 * wide - 2 ? 0xffff : numbers >> c % 2 * VEC, sum[n][c]);
}

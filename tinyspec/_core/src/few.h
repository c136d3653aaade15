/* Quantised weights times a few rows: they are unpacked in registers, and the same vectors of weights serve all rows. Sums run as
 * in slab.h, so the bits are those of the unpacked matrix. Before it is included, besides the words of slab.h: MUL(a, b); SHARE: most
 * rows, 1, 4 or 8; WIDE(k): blocks at a time for k rows.
 *
 * A pair of inputs of VEC outputs is, where the processor multiplies pairs of bfloat16, a vector of these; else two of floats.
 */
#ifdef DOT
typedef __m512bh FN(Pair);

/* What stays the same while a group is unpacked. */
typedef struct {
    __m512 scale[1], shift[1];
    __m512 value; /* of each q of four bits */
    __m512i zip;  /* order of words: first numbers and second numbers by turns */
} FN(Unpacking);

INLINE FN(Unpacking) FN(make_unpacking)(const int format) {
    FN(Unpacking) u;
    float value[16];
    uint16_t zip[32];
    for (int i = 0; i < 16; i++) value[i] = (float)(format == Q4_0 ? i - 8 : i), zip[2 * i] = i, zip[2 * i + 1] = 16 + i;
    u.value = _mm512_loadu_ps(value), u.zip = _mm512_loadu_si512((const void *)zip);
    u.scale[0] = u.shift[0] = _mm512_setzero_ps();
    return u;
}

INLINE V FN(from_halves)(const uint8_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }

/* Inputs 2 j and 2 j + 1 of those that stand in the words, of 16 outputs. */
INLINE FN(Pair) FN(unpack_pair)(const int format, const FN(Unpacking) *u, const uint8_t *at, const int p, const int j) {
    const __m512i words = _mm512_loadu_si512((const void *)at);
    __m512 q[2];
    UNROLL for (int i = 0; i < 2; i++) {
        if (format == Q8_0)
            q[i] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24 - 16 * j - 8 * i), 24));
        else
            q[i] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 8 * j + 4 * i), u->value); /* looks at four bits alone */
        q[i] = format == Q4_1 ? _mm512_fmadd_ps(u->scale[p], q[i], u->shift[p]) : _mm512_mul_ps(u->scale[p], q[i]);
    }
    return (__m512bh)_mm512_permutexvar_epi16(u->zip, (__m512i)_mm512_cvtne2ps_pbh(q[1], q[0]));
}

INLINE V FN(add_pair)(V sum, FN(Pair) pair, const uint16_t *x) { return dot(sum, pair, x); }
INLINE void FN(store_pair)(uint16_t *to, FN(Pair) pair) { _mm512_storeu_si512((void *)to, (__m512i)pair); }

#else
typedef uint32_t FN(Words) __attribute__((vector_size(4 * VEC)));
typedef int32_t FN(Ints) __attribute__((vector_size(4 * VEC)));
typedef uint16_t FN(Shorts) __attribute__((vector_size(2 * VEC)));
typedef float FN(Floats) __attribute__((vector_size(4 * VEC)));
typedef struct {
    V even, odd;
} FN(Pair);
typedef struct {
    V scale[PARTS], shift[PARTS];
} FN(Unpacking);

INLINE FN(Unpacking) FN(make_unpacking)(const int format) {
    FN(Unpacking) u;
    (void)format;
    UNROLL for (int p = 0; p < PARTS; p++) u.scale[p] = u.shift[p] = SET(0.0f);
    return u;
}

/* The same bits as another type: V is no type of arithmetic with every compiler. */
INLINE V FN(of_words)(FN(Words) words) {
    V v;
    memcpy(&v, &words, sizeof v);
    return v;
}
INLINE FN(Words) FN(of_floats)(V v) {
    FN(Words) words;
    memcpy(&words, &v, sizeof v);
    return words;
}

/* What VEC float16 stand for: from_float16 of each. */
INLINE V FN(from_halves)(const uint8_t *from) {
    FN(Shorts) halves;
    memcpy(&halves, from, sizeof halves);
    const FN(Words) h = __builtin_convertvector(halves, FN(Words)), sign = (h & 0x8000) << 16, exponent = h & 0x7c00;
    const FN(Words) infinite = (FN(Words))(exponent == 0x7c00) & 0x7f800000, tiny = (FN(Words))(exponent == 0);
    const FN(Floats) fraction = __builtin_convertvector((FN(Ints))(h & 1023), FN(Floats)) * (1.0f / 16777216.0f);
    const FN(Words) small = (FN(Words))fraction, large = ((h & 0x7fff) << 13) + (112u << 23);
    return FN(of_words)(sign | infinite | (tiny & small) | (~tiny & large));
}

/* Input i of those that stand in the words, of VEC outputs: rounded to bfloat16, as floats. */
INLINE V FN(unpack_one)(const int format, FN(Words) words, const int i, V scale, V shift) {
    FN(Ints) q;
    if (format == Q8_0)
        q = (FN(Ints))(words << (24 - 8 * i)) >> 24;
    else if (format == Q4_0)
        q = (FN(Ints))((words ^ 0x88888888u) << (28 - 4 * i)) >> 28; /* q - 8: the highest of four bits as a sign */
    else
        q = (FN(Ints))(words >> 4 * i & 15);
    const FN(Floats) number = __builtin_convertvector(q, FN(Floats));
    const V value = FN(of_words)((FN(Words))number);
    const V weight = format == Q4_1 ? FMA(scale, value, shift) : MUL(scale, value);
    const FN(Words) bits = FN(of_floats)(weight);
    return FN(of_words)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

INLINE FN(Pair) FN(unpack_pair)(const int format, const FN(Unpacking) *u, const uint8_t *at, const int p, const int j) {
    FN(Words) words;
    memcpy(&words, at, sizeof words);
    return (FN(Pair)){FN(unpack_one)(format, words, 2 * j, u->scale[p], u->shift[p]),
                      FN(unpack_one)(format, words, 2 * j + 1, u->scale[p], u->shift[p])};
}

INLINE V FN(add_pair)(V sum, FN(Pair) pair, const float *x) {
    return FMA(pair.odd, SET(x[1]), FMA(pair.even, SET(x[0]), sum));
}
INLINE void FN(store_pair)(uint16_t *to, FN(Pair) pair) {
    const FN(Words) both = FN(of_floats)(pair.even) >> 16 | FN(of_floats)(pair.odd);
    memcpy(to, &both, sizeof both);
}
#endif

INLINE void FN(begin_group)(const int format, FN(Unpacking) *u, const uint8_t *group) {
    UNROLL for (int p = 0; p < PARTS; p++) {
        u->scale[p] = FN(from_halves)(group + 2 * VEC * p);
        if (format == Q4_1) u->shift[p] = FN(from_halves)(group + 32 + 2 * VEC * p);
    }
}

INLINE void FN(multiply_few)(const int format, const int K, const int G, const Matrix *w, int block, const NUMBER *x, int ldx,
                             float *y, int ldy, int add) {
    V sum[MOST][4 * PARTS];
    const size_t bytes = group_bytes(format), head = group_head(format), step = w->in / GROUP * bytes;
    const int together = format == Q8_0 ? 4 : 8; /* inputs in a word */
    const uint8_t *from = (const uint8_t *)w->data + block * step;
    FN(Unpacking) u = FN(make_unpacking)(format);
    UNROLL for (int k = 0; k < K; k++)
        UNROLL for (int g = 0; g < G * PARTS; g++) sum[k][g] = SET(0.0f);
    for (int i = 0; i < w->in; i += GROUP, from += bytes)
        UNROLL for (int g = 0; g < G; g++) {
            const uint8_t *group = from + g * step;
            FN(begin_group)(format, &u, group);
            for (int t = 0; t < GROUP / together; t++) {
                const uint8_t *at = group + head + 64 * t;
                __builtin_prefetch(at + NEAR, 0, 0);
                UNROLL for (int j = 0; j < together / 2; j++)
                    UNROLL for (int p = 0; p < PARTS; p++) {
                        const FN(Pair) pair = FN(unpack_pair)(format, &u, at + 4 * VEC * p, p, j);
                        UNROLL for (int k = 0; k < K; k++)
                            sum[k][g * PARTS + p] =
                                FN(add_pair)(sum[k][g * PARTS + p], pair, x + (size_t)k * ldx + i + together * t + 2 * j);
                    }
            }
        }
    FN(finish)(K, G, w, block, sum, y, ldy, add);
}

#define FEW_OF(format, K)                                                                                                   \
    static TARGET void FN(few_##format##_##K)(const Matrix *w, int b, int wide, const NUMBER *x, int ldx, float *y, int ldy, \
                                              int add) {                                                                    \
        if (wide)                                                                                                           \
            FN(multiply_few)(format, K, WIDE(K), w, b, x, ldx, y, ldy, add);                                                \
        else                                                                                                                \
            FN(multiply_few)(format, K, 1, w, b, x, ldx, y, ldy, add);                                                      \
    }
#if SHARE == 1
#define FEW_ROWS(format) FEW_OF(format, 1)
#define FEW_LIST(format) {FN(few_##format##_1)}
#else
#define FEW_FOUR(format) FEW_OF(format, 1) FEW_OF(format, 2) FEW_OF(format, 3) FEW_OF(format, 4)
#define LIST_FOUR(format) FN(few_##format##_1), FN(few_##format##_2), FN(few_##format##_3), FN(few_##format##_4)
#if SHARE == 4
#define FEW_ROWS(format) FEW_FOUR(format)
#define FEW_LIST(format) {LIST_FOUR(format)}
#else
#define FEW_ROWS(format) FEW_FOUR(format) FEW_OF(format, 5) FEW_OF(format, 6) FEW_OF(format, 7) FEW_OF(format, 8)
#define FEW_LIST(format) \
    {LIST_FOUR(format), FN(few_##format##_5), FN(few_##format##_6), FN(few_##format##_7), FN(few_##format##_8)}
#endif
#endif
FEW_ROWS(Q8_0) FEW_ROWS(Q4_0) FEW_ROWS(Q4_1)
static void (*const FN(fews)[FORMATS - Q8_0][SHARE])(const Matrix *, int, int, const NUMBER *, int, float *, int, int) = {
    FEW_LIST(Q8_0), FEW_LIST(Q4_0), FEW_LIST(Q4_1)};

static void FN(product_few)(const Matrix *w, int first, int last, const void *x, int ldx, int rows, float *y, int ldy, int add) {
    for (int b = first; b < last;) {
        const int wide = WIDE(rows) <= last - b;
        FN(fews)[w->format - Q8_0][rows - 1](w, b, wide, x, ldx, y, ldy, add);
        b += wide ? WIDE(rows) : 1;
    }
}

/* A block as bfloat16, [in / 2][16][2]. */
static TARGET void FN(unpack)(const Matrix *w, int block, uint16_t *to) {
    const size_t bytes = group_bytes(w->format), head = group_head(w->format);
    const uint8_t *group = (const uint8_t *)w->data + block * (w->in / GROUP * bytes);
    FN(Unpacking) u = FN(make_unpacking)(w->format);
    for (int i = 0; i < w->in; i += GROUP, group += bytes) {
        FN(begin_group)(w->format, &u, group);
        const int together = w->format == Q8_0 ? 4 : 8;
        for (int t = 0; t < GROUP / together; t++)
            UNROLL for (int j = 0; j < 4; j++) {
                if (2 * j == together) break;
                UNROLL for (int p = 0; p < PARTS; p++, to += 2 * VEC) {
                    const uint8_t *at = group + head + 64 * t + 4 * VEC * p;
                    FN(store_pair)(to, w->format == Q8_0   ? FN(unpack_pair)(Q8_0, &u, at, p, j)
                                       : w->format == Q4_0 ? FN(unpack_pair)(Q4_0, &u, at, p, j)
                                                           : FN(unpack_pair)(Q4_1, &u, at, p, j));
                }
            }
    }
}
#undef FEW_OF
#undef FEW_ROWS
#undef FEW_LIST
#undef FEW_FOUR
#undef LIST_FOUR
#undef SHARE
#undef WIDE

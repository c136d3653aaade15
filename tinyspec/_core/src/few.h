/* Quantised weights times a few rows, where the processor multiplies pairs of bfloat16: they are unpacked in registers, and the
 * same vector of weights serves all rows. Sums run as in slab.h, so the bits are those of the unpacked matrix. */

/* What stays the same while a group is unpacked. */
typedef struct {
    __m512 scale, shift;
    __m512 value;  /* of each q of four bits */
    __m512i zip;   /* order of words: first numbers and second numbers by turns */
} Unpacking;

static inline __attribute__((always_inline)) TARGET Unpacking make_unpacking(const int format) {
    Unpacking u;
    float value[16];
    uint16_t zip[32];
    for (int i = 0; i < 16; i++) value[i] = (float)(format == Q4_0 ? i - 8 : i), zip[2 * i] = i, zip[2 * i + 1] = 16 + i;
    u.value = _mm512_loadu_ps(value), u.zip = _mm512_loadu_si512((const void *)zip);
    u.scale = u.shift = _mm512_setzero_ps();
    return u;
}

static inline __attribute__((always_inline)) TARGET void begin_group(const int format, Unpacking *u, const uint8_t *group) {
    u->scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)group));
    if (format == Q4_1) u->shift = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(group + 32)));
}

/* Inputs 2 j and 2 j + 1 of those that stand in the words, of 16 outputs: [16][2] bfloat16. */
static inline __attribute__((always_inline)) TARGET __m512bh unpack_pair(const int format, const Unpacking *u, __m512i words,
                                                                          const int j) {
    __m512 q[2];
    UNROLL for (int i = 0; i < 2; i++) {
        if (format == Q8_0)
            q[i] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 24 - 16 * j - 8 * i), 24));
        else
            q[i] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, 8 * j + 4 * i), u->value); /* looks at four bits alone */
        q[i] = format == Q4_1 ? _mm512_fmadd_ps(u->scale, q[i], u->shift) : _mm512_mul_ps(u->scale, q[i]);
    }
    return (__m512bh)_mm512_permutexvar_epi16(u->zip, (__m512i)_mm512_cvtne2ps_pbh(q[1], q[0]));
}

enum { NEAR = 1024 }; /* bytes by which weights are asked for before they are needed */

static inline __attribute__((always_inline)) TARGET void multiply_few(const int format, const int K, const int G, const Matrix *w,
                                                                     int block, const uint16_t *x, int ldx, float *y, int ldy, int add) {
    V sum[FEW][4 * PARTS];
    const size_t bytes = group_bytes(format), head = group_head(format), step = w->in / GROUP * bytes;
    const int together = format == Q8_0 ? 4 : 8; /* inputs in a word */
    const uint8_t *from = (const uint8_t *)w->data + block * step;
    Unpacking u = make_unpacking(format);
    UNROLL for (int k = 0; k < K; k++)
        UNROLL for (int g = 0; g < G; g++) sum[k][g] = SET(0.0f);
    for (int i = 0; i < w->in; i += GROUP, from += bytes)
        UNROLL for (int g = 0; g < G; g++) {
            const uint8_t *group = from + g * step;
            begin_group(format, &u, group);
            for (int t = 0; t < GROUP / together; t++) {
                const uint8_t *at = group + head + 64 * t;
                const __m512i words = _mm512_loadu_si512((const void *)at);
                __builtin_prefetch(at + NEAR, 0, 0);
                UNROLL for (int j = 0; j < together / 2; j++) {
                    const __m512bh pairs = unpack_pair(format, &u, words, j);
                    UNROLL for (int k = 0; k < K; k++)
                        sum[k][g] = dot(sum[k][g], pairs, x + (size_t)k * ldx + i + together * t + 2 * j);
                }
            }
        }
    FN(finish)(K, G, w, block, sum, y, ldy, add);
}

#define FEW_OF(format, K)                                                                                                    \
    static TARGET void few_##format##_##K(const Matrix *w, int b, int wide, const uint16_t *x, int ldx, float *y, int ldy, int add) { \
        if (wide)                                                                                                            \
            multiply_few(format, K, WIDE(K), w, b, x, ldx, y, ldy, add);                                                              \
        else                                                                                                                 \
            multiply_few(format, K, 1, w, b, x, ldx, y, ldy, add);                                                                    \
    }
#define WIDE(k) ((k) <= 2 ? 4 : (k) <= 4 ? 2 : 1)
#define FEW_ROWS(format) \
    FEW_OF(format, 1) FEW_OF(format, 2) FEW_OF(format, 3) FEW_OF(format, 4) FEW_OF(format, 5) FEW_OF(format, 6) FEW_OF(format, 7) \
    FEW_OF(format, 8)
FEW_ROWS(Q8_0) FEW_ROWS(Q4_0) FEW_ROWS(Q4_1)
#define FEW_LIST(format) \
    {few_##format##_1, few_##format##_2, few_##format##_3, few_##format##_4, few_##format##_5, few_##format##_6, few_##format##_7, \
     few_##format##_8}
static void (*const fews[FORMATS - Q8_0][FEW])(const Matrix *, int, int, const uint16_t *, int, float *, int, int) = {
    FEW_LIST(Q8_0), FEW_LIST(Q4_0), FEW_LIST(Q4_1)};

static void product_few(const Matrix *w, int first, int last, const uint16_t *x, int ldx, int rows, float *y, int ldy, int add) {
    for (int b = first; b < last;) {
        const int wide = WIDE(rows) <= last - b;
        fews[w->format - Q8_0][rows - 1](w, b, wide, x, ldx, y, ldy, add);
        b += wide ? WIDE(rows) : 1;
    }
}

static TARGET void unpack_avx512bf16(const Matrix *w, int block, uint16_t *to) {
    const size_t bytes = group_bytes(w->format), head = group_head(w->format);
    const uint8_t *group = (const uint8_t *)w->data + block * (w->in / GROUP * bytes);
    Unpacking u = make_unpacking(w->format);
    for (int i = 0; i < w->in; i += GROUP, group += bytes) {
        begin_group(w->format, &u, group);
        const int together = w->format == Q8_0 ? 4 : 8;
        for (int t = 0; t < GROUP / together; t++) {
            const __m512i words = _mm512_loadu_si512((const void *)(group + head + 64 * t));
            UNROLL for (int j = 0; j < 4; j++) {
                if (2 * j == together) break;
                const __m512bh pairs = w->format == Q8_0   ? unpack_pair(Q8_0, &u, words, j)
                                       : w->format == Q4_0 ? unpack_pair(Q4_0, &u, words, j)
                                                           : unpack_pair(Q4_1, &u, words, j);
                _mm512_storeu_si512((void *)to, (__m512i)pairs);
                to += 2 * BLOCK;
            }
        }
    }
}

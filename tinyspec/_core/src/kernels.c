/* One set of kernels for each kind of processor, and which of them this one gets. See slab.h for what they do. */
#include "compute.h"
#include "quantised.h"

#include <math.h>
#include <string.h>

/* Portable: four floats, which every compiler knows how to keep in a vector register. */
typedef float V4 __attribute__((vector_size(16)));
typedef uint32_t U4 __attribute__((vector_size(16)));
static inline V4 load4(const float *p) {
    V4 v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline void store4(float *p, V4 v) { memcpy(p, &v, sizeof v); }
static inline V4 even4(const uint16_t *p) {
    U4 v;
    memcpy(&v, p, sizeof v);
    return (V4)(v << 16);
}
static inline V4 odd4(const uint16_t *p) {
    U4 v;
    memcpy(&v, p, sizeof v);
    return (V4)(v & 0xffff0000u);
}
static inline V4 half4(const uint16_t *p) { return (V4){widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }
static inline V4 max4(V4 a, V4 b) {
    for (int i = 0; i < 4; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
}
static inline V4 low4(V4 a, V4 b) { return (V4){a[0], b[0], a[1], b[1]}; }
static inline V4 high4(V4 a, V4 b) { return (V4){a[2], b[2], a[3], b[3]}; }
static inline void transpose4(V4 *v) {
    const V4 a = low4(v[0], v[2]), b = high4(v[0], v[2]), c = low4(v[1], v[3]), d = high4(v[1], v[3]);
    v[0] = low4(a, c), v[1] = high4(a, c), v[2] = low4(b, d), v[3] = high4(b, d);
}
enum { LATER = 16 }; /* keys or values that are asked for before they are needed */
enum { AHEAD = 64 }; /* inputs whose weights are asked for before they are needed */
enum { NEAR = 1024 }; /* bytes of quantised weights by which they are */

/* Sums of rows and a few neighbouring blocks, [rows][wide][BLOCK], of which the last is not whole, go to y: plus bias, plus what
 * stands there. */
static void put(const Matrix *w, int block, int wide, const float *sums, int rows, float *y, int ldy, int add) {
    const int at = block * BLOCK, n = w->out - at < wide * BLOCK ? w->out - at : wide * BLOCK;
    for (int k = 0; k < rows; k++, sums += wide * BLOCK, y += ldy)
        for (int o = 0; o < n; o++) {
            const float v = w->bias ? sums[o] + w->bias[at + o] : sums[o];
            y[at + o] = add ? y[at + o] + v : v;
        }
}

#define SUFFIX _plain
#define TARGET
#define VEC 4
#define V V4
#define LOAD(p) load4(p)
#define STORE(p, v) store4(p, v)
#define SET(x) ((V4){x, x, x, x})
#if defined(__aarch64__)
#include <arm_neon.h>
#define FMA(a, b, c) ((V4)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define MOST 5 /* 32 registers of four floats */
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#define MOST 3 /* 16 of them */
#endif
#define ADD(a, b) ((a) + (b))
#define MUL(a, b) ((a) * (b))
#define MAX(a, b) max4(a, b)
#define FUSE(a, b, c) ((a) * (b) + (c)) /* of single floats */
#define TOTAL(v) (((v)[0] + (v)[2]) + ((v)[1] + (v)[3]))
#define TRANSPOSE(v) transpose4(v)
#define CHAINS 4
#define BESIDE 3
#define HALF(p) half4(p)
#define EVEN(p) even4(p)
#define ODD(p) odd4(p)
#define SOME(k) ((k) == 1 ? 2 : 1)
#define SHARE 1
#define WIDE(k) 1
#include "slab.h"
#include "few.h"
#include "rowwise.h"
#include "attend.h"
static const Kernel portable = {"portable", product_plain, NULL, NULL, product_few_plain, 1, unpack_plain, attend_plain, activate_plain, norm_plain, place_plain};

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* Lanes ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). */
static inline __attribute__((always_inline, target("avx2,fma"))) float total8(__m256 v) {
    const __m256 sum = _mm256_hadd_ps(_mm256_hadd_ps(v, v), v);
    return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1)));
}
/* Eight vectors of eight words transposed: two by two, four by four, then halves. */
static inline __attribute__((always_inline, target("avx2,fma"))) void transpose8(__m256 *v) {
    __m256 two[8], four[8];
    for (int i = 0; i < 8; i += 2)
        two[i] = _mm256_unpacklo_ps(v[i], v[i + 1]), two[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            four[i + 2 * j] = _mm256_shuffle_ps(two[i + j], two[i + j + 2], 0x44);
            four[i + 2 * j + 1] = _mm256_shuffle_ps(two[i + j], two[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_permute2f128_ps(four[i], four[i + 4], 0x20);
        v[i + 4] = _mm256_permute2f128_ps(four[i], four[i + 4], 0x31);
    }
}
static const uint32_t upper[8] = {~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu};
static inline __attribute__((always_inline, target("avx2,fma"))) __m256 odd8(const uint16_t *p) {
    const void *mask = upper; /* stays in memory: six rows leave no register for it */
    __asm__ volatile("" : "+r"(mask));
    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)mask)));
}
#define SUFFIX _avx2
#define TARGET __attribute__((target("avx2,fma")))
#define VEC 8
#define V __m256
#define LOAD(p) _mm256_loadu_ps(p)
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define SET(x) _mm256_set1_ps(x)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define ADD(a, b) _mm256_add_ps(a, b)
#define MUL(a, b) _mm256_mul_ps(a, b)
#define MAX(a, b) _mm256_max_ps(a, b)
#define FUSE(a, b, c) __builtin_fmaf(a, b, c)
#define TOTAL(v) total8(v)
#define TRANSPOSE(v) transpose8(v)
#define CHAINS 4
#define BESIDE 3
#define HALF(p) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define EVEN(p) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)(p)), 16))
#define ODD(p) odd8(p)
#define SOME(k) ((k) == 1 ? 4 : (k) <= 3 ? 2 : 1)
#define MOST 6
#define SHARE 4
#define WIDE(k) ((k) == 1 ? 2 : 1)
#include "slab.h"
#include "few.h"
#include "rowwise.h"
#include "attend.h"
static const Kernel avx2 = {"avx2", product_avx2, NULL, NULL, product_few_avx2, 4, unpack_avx2, attend_avx2, activate_avx2, norm_avx2, place_avx2};

/* Each lane and the one eight further on, then as above. */
static inline __attribute__((always_inline, target("avx512f,avx2,fma"))) float total16(__m512 v) {
    return total8(_mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1))));
}
/* Sixteen vectors of sixteen words transposed: two by two, four by four, then quarters. */
static inline __attribute__((always_inline, target("avx512f,avx2,fma"))) void transpose16(__m512 *v) {
    __m512 two[16], four[16];
    for (int i = 0; i < 16; i += 2)
        two[i] = _mm512_unpacklo_ps(v[i], v[i + 1]), two[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            four[i + 2 * j] = _mm512_shuffle_ps(two[i + j], two[i + j + 2], 0x44);
            four[i + 2 * j + 1] = _mm512_shuffle_ps(two[i + j], two[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        const __m512 *f = four + i; /* f[4 r]: in quarter q, column 4 q + i of rows 4 r to 4 r + 3 */
        const __m512 even = _mm512_shuffle_f32x4(f[0], f[4], 0x88), even8 = _mm512_shuffle_f32x4(f[8], f[12], 0x88);
        const __m512 odd = _mm512_shuffle_f32x4(f[0], f[4], 0xdd), odd8 = _mm512_shuffle_f32x4(f[8], f[12], 0xdd);
        v[i] = _mm512_shuffle_f32x4(even, even8, 0x88);
        v[i + 4] = _mm512_shuffle_f32x4(odd, odd8, 0x88);
        v[i + 8] = _mm512_shuffle_f32x4(even, even8, 0xdd);
        v[i + 12] = _mm512_shuffle_f32x4(odd, odd8, 0xdd);
    }
}
#define SUFFIX _avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx2,fma")))
#include "avx512.h"
#define SOME(k) ((k) <= 2 ? 4 : 2)
#define MOST 12
#define SHARE 8
#define WIDE(k) ((k) <= 2 ? 4 : (k) <= 4 ? 2 : 1)
#include "slab.h"
#include "few.h"
#include "rowwise.h"
#include "attend.h"
static const Kernel avx512 = {"avx512", product_avx512, NULL, NULL, product_few_avx512, 8, unpack_avx512, attend_avx512, activate_avx512, norm_avx512, place_avx512};

/* Where the processor multiplies pairs of bfloat16 and adds both products to a float, a bfloat16 matrix takes half the steps.
 * Its rows are rounded to bfloat16 first; all else is as above. */
#if defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 11
#define HAS_DOT 1
#define SUFFIX _avx512bf16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512bf16,avx2,fma")))
#include "avx512.h"
static inline __attribute__((always_inline)) TARGET __m512 dot(__m512 sum, __m512bh pairs, const uint16_t *pair) {
    int both;
    memcpy(&both, pair, sizeof both);
    return _mm512_dpbf16_ps(sum, pairs, (__m512bh)_mm512_set1_epi32(both));
}
#define DOT(sum, from, pair) dot(sum, (__m512bh)_mm512_loadu_si512((const void *)(from)), pair)
#define SOME(k) ((k) <= 2 ? 4 : (k) <= 12 ? 2 : 1)
#define MOST 24 /* two slabs would take turns: one that waits for memory, one that computes */
/* n numbers rounded to bfloat16; `to` may be where they stand. */
static TARGET void round_avx512bf16(const float *x, int n, uint16_t *to) {
    for (int i = 0; i < n; i += VEC) {
        const __mmask16 some = n - i < VEC ? (1u << (n - i)) - 1 : 0xffff;
        const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, x + i));
        _mm512_mask_storeu_epi16(to + i, some, _mm512_castsi256_si512((__m256i)rounded));
    }
}
#define SHARE 8
#define WIDE(k) ((k) <= 2 ? 4 : (k) <= 4 ? 2 : 1)
#include "slab.h"
#include "few.h"
#include "rowwise.h"
#include "attend.h"
static const Kernel avx512bf16 = {"avx512bf16",      product_avx512,    product_avx512bf16,  round_avx512bf16, product_few_avx512bf16, 8,
                                  unpack_avx512bf16, attend_avx512bf16, activate_avx512bf16, norm_avx512bf16,  place_avx512bf16};
#endif
#endif

#ifndef SUPPORTS /* an emulation says yes to all */
#define SUPPORTS(feature) __builtin_cpu_supports(feature)
#endif

const Kernel *kernel_named(const char *name) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    const int wide = SUPPORTS("avx512f") && SUPPORTS("avx512bw");
#ifdef HAS_DOT
    if (!strcmp(name, "avx512bf16") && wide && SUPPORTS("avx512bf16")) return &avx512bf16;
#endif
    if (!strcmp(name, "avx512") && wide) return &avx512;
    if (!strcmp(name, "avx2") && SUPPORTS("avx2") && SUPPORTS("fma")) return &avx2;
#endif
    return strcmp(name, "portable") ? NULL : &portable;
}

/* Quantised matrices with scales and shifts that are small powers of two: unpacked as the formula says, and multiplied. */
static int quantised_sound(const Kernel *kernel) {
    enum { IN = 2 * GROUP, BLOCKS = 5, OUT = BLOCKS * BLOCK, MOST_BYTES = BLOCKS * 2 * (32 + 512) }; /* four at a time, and one */
    uint8_t data[MOST_BYTES];
    uint16_t expected[OUT * IN], got[OUT * IN], rounded[FEW * IN];
    float x[FEW * IN], y[FEW * OUT], same[FEW * OUT];
    for (int i = 0; i < FEW * IN; i++) rounded[i] = narrow(x[i] = (float)(i * 5 % 13 - 6) / 4);
    for (int format = Q8_0; format < FORMATS; format++) {
        const size_t bytes = group_bytes(format), head = group_head(format);
        for (size_t i = 0; i < 2 * BLOCKS * bytes; i++) data[i] = (uint8_t)(i * 37 % 251);
        for (int g = 0; g < 2 * BLOCKS; g++)
            for (size_t i = 0; i < head; i += 2) data[g * bytes + i] = 0, data[g * bytes + i + 1] = 0x30 + i % 3 * 4; /* 1/8 to 1 */
        const Matrix w = {data, NULL, OUT, IN, format}, unpacked = {expected, NULL, OUT, IN, HALVES};
        for (int at = 0; at < OUT * IN; at++) {
            const int b = at / (BLOCK * IN), i = at % (BLOCK * IN) / (2 * BLOCK) * 2 + at % 2, o = at / 2 % BLOCK;
            expected[at] = unpack_weight(format, data + (b * (IN / GROUP) + i / GROUP) * bytes, o, i % GROUP);
        }
        for (int b = 0; b < BLOCKS; b++) kernel->unpack(&w, b, got + b * BLOCK * IN);
        if (memcmp(expected, got, sizeof got)) return 0;
        for (int rows = 1; rows <= kernel->few; rows++) {
            if (kernel->product_rounded)
                kernel->product_rounded(&unpacked, 0, BLOCKS, rounded, IN, rows, same, OUT, 0);
            else
                kernel->product(&unpacked, 0, BLOCKS, x, IN, rows, same, OUT, 0);
            kernel->product_few(&w, 0, BLOCKS, kernel->product_rounded ? (const void *)rounded : x, IN, rows, y, OUT, 0);
            if (memcmp(y, same, (size_t)rows * OUT * sizeof(float))) return 0;
        }
    }
    return 1;
}

/* Small numbers, whose products and sums are exact in float and bfloat16 whatever the order: any sound kernel gives the same. */
int kernel_sound(const Kernel *kernel) {
    enum { ROWS = 25, IN = 10, OUT = 70, ALL = (OUT + BLOCK - 1) / BLOCK * BLOCK * IN };
    float weights[ALL], x[ROWS * IN], bias[OUT], expected[ROWS * OUT], got[ROWS * OUT];
    uint16_t halves[ALL], rounded[ROWS * IN];
    for (int i = 0; i < ALL; i++) halves[i] = narrow(weights[i] = (float)(i * 7 % 11 - 5) / 8);
    for (int i = 0; i < ROWS * IN; i++) rounded[i] = narrow(x[i] = (float)(i * 5 % 13 - 6) / 4);
    for (int i = 0; i < OUT; i++) bias[i] = (float)(i % 5);
    for (int half = 0; half < 2; half++) {
        const Matrix w = {half ? (const void *)halves : weights, bias, OUT, IN, half};
        const int blocks = (OUT + BLOCK - 1) / BLOCK;
        for (int rows = 1; rows <= ROWS; rows++) {
            for (int i = 0; i < ROWS * OUT; i++) expected[i] = got[i] = (float)i;
            portable.product(&w, 0, blocks, x, IN, rows, expected, OUT, 1);
            if (half && kernel->product_rounded)
                kernel->product_rounded(&w, 0, blocks, rounded, IN, rows, got, OUT, 1);
            else
                kernel->product(&w, 0, blocks, x, IN, rows, got, OUT, 1);
            if (memcmp(expected, got, sizeof got)) return 0;
        }
    }
    return quantised_sound(kernel);
}

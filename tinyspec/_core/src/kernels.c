/* One set of kernels for each kind of processor, and which of them this one gets. See slab.h for what they do. */
#include "compute.h"

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
enum { AHEAD = 16 }; /* inputs whose weights are asked for before they are needed */

#define SUFFIX _plain
#define NAME "portable"
#define TARGET
#define VEC 4
#define V V4
#define LOAD(p) load4(p)
#define STORE(p, v) store4(p, v)
#define SET(x) ((V4){x, x, x, x})
#if defined(__aarch64__)
#include <arm_neon.h>
#define FMA(a, b, c) ((V4)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define MOST 6
#else
#define FMA(a, b, c) ((a) * (b) + (c))
#define MOST 6
#endif
#define ADD(a, b) ((a) + (b))
#define MAX(a, b) max4(a, b)
#define TOTAL(v) (((v)[0] + (v)[2]) + ((v)[1] + (v)[3]))
#define CHAINS 4
#define HALF(p) half4(p)
#define EVEN(p) even4(p)
#define ODD(p) odd4(p)
#define SOME(k) ((k) == 1 ? 2 : 1)
#include "slab.h"

#if defined(__x86_64__) && defined(__GNUC__)
#ifndef WIDE_INTRINSICS /* a test may bring an emulation of the wide ones */
#include <immintrin.h>
#endif

static inline __attribute__((always_inline, target("avx2,fma"))) float total8(__m256 v) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
#define SUFFIX _avx2
#define NAME "avx2"
#define TARGET __attribute__((target("avx2,fma")))
#define VEC 8
#define V __m256
#define LOAD(p) _mm256_loadu_ps(p)
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define SET(x) _mm256_set1_ps(x)
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#define ADD(a, b) _mm256_add_ps(a, b)
#define MAX(a, b) _mm256_max_ps(a, b)
#define TOTAL(v) total8(v)
#define CHAINS 4
#define HALF(p) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))), 16))
#define EVEN(p) _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)(p)), 16))
#define ODD(p) \
    _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)(p)), _mm256_set1_epi32((int)0xffff0000)))
#define SOME(k) ((k) == 1 ? 4 : (k) <= 3 ? 2 : 1)
#define MOST 6
#include "slab.h"

#ifndef WIDE_TARGET
#define WIDE_TARGET __attribute__((target("avx512f,avx512bw,avx2,fma")))
#endif
#define SUFFIX _avx512
#define NAME "avx512"
#define TARGET WIDE_TARGET
#define VEC 16
#define V __m512
#define LOAD(p) _mm512_loadu_ps(p)
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define SET(x) _mm512_set1_ps(x)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define ADD(a, b) _mm512_add_ps(a, b)
#define MAX(a, b) _mm512_max_ps(a, b)
#define TOTAL(v) _mm512_reduce_add_ps(v)
#define CHAINS 2
#define HALF(p) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define EVEN(p) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512((const void *)(p)), 16))
#define ODD(p) \
    _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512((const void *)(p)), _mm512_set1_epi32((int)0xffff0000)))
#define SOME(k) ((k) <= 2 ? 4 : 2)
#define MOST 12
#include "slab.h"
#endif

const Kernel *kernel_named(const char *name) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (!strcmp(name, "avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) return &kernel_avx512;
    if (!strcmp(name, "avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &kernel_avx2;
#endif
    return strcmp(name, "portable") ? NULL : &kernel_plain;
}

const Kernel *kernel_best(void) {
    static const char *const best_first[] = {"avx512", "avx2", "portable"};
    const Kernel *found = NULL;
    for (int i = 0; !found; i++) found = kernel_named(best_first[i]);
    return found;
}

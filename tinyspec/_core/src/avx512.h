/* The words of slab.h, rowwise.h and attend.h where a vector is sixteen floats. */
#define VEC 16
#define V __m512
#define LOAD(p) _mm512_loadu_ps(p)
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define SET(x) _mm512_set1_ps(x)
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define ADD(a, b) _mm512_add_ps(a, b)
#define MUL(a, b) _mm512_mul_ps(a, b)
#define MAX(a, b) _mm512_max_ps(a, b)
#define FUSE(a, b, c) __builtin_fmaf(a, b, c)
#define TOTAL(v) total16(v)
#define TRANSPOSE(v) transpose16(v)
#define CHAINS 4
#define BESIDE 6
#define HALF(p) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))), 16))
#define EVEN(p) _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512((const void *)(p)), 16))
#define ODD(p) \
    _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512((const void *)(p)), _mm512_set1_epi32((int)0xffff0000)))

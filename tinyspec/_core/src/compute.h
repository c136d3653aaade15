/* What the compiled transformer is made of: a pool of threads, packed matrices, attention, and the driver of layers. */
#ifndef TINYSPEC_COMPUTE_H
#define TINYSPEC_COMPUTE_H

#include <stddef.h>
#include <stdint.h>

enum { BLOCK = 16, TILE = 96 }; /* outputs that stand together in a packed matrix; rows that go through all layers together */

/* How the weights of a matrix are stored. Quantised ones are llama.cpp's: 32 inputs of an output share a scale d, of Q4_1 also a
 * shift m, both float16, and a weight is the bfloat16 that is nearest to d q (q in -128..127 or -8..7) or d q + m (q in 0..15). */
enum { FLOATS, HALVES, Q8_0, Q4_0, Q4_1, FORMATS };
enum { GROUP = 32 };

/* A weight matrix [out, in] in blocks of 16 outputs. float32: [blocks][in][16]; bfloat16: [blocks][in / 2][16][2]; quantised, see
 * quantised.h: [blocks][in / 32] groups. */
typedef struct {
    const void *data;
    const float *bias; /* [out] or NULL */
    int out, in, format;
} Matrix;

typedef struct {
    const float *gain, *bias; /* bias NULL: RMSNorm */
} Norm;

typedef struct {
    Norm norm1, norm2;
    Matrix qkv, out, up, down;
    Norm q_norm, k_norm; /* RMSNorm of each head of queries and of keys, before the turn; gain NULL: none */
} Layer;

typedef struct {
    int layers, d, heads, shared, width, hidden; /* shared: key/value heads; width: of a head; hidden: of the MLP */
    int rms, gated, silu, half;                  /* half: keys and values are bfloat16 */
    float eps, scale;
    const Layer *layer;
    Norm final;
    Matrix head;
} Stack;

/* One row of a pass. Its keys are summed in this order: slots 0..prefix-1, then `extra`; before them the probe prefix. */
typedef struct {
    char *cache;          /* [layers, 2, shared, capacity, width] */
    const float *cos, *sin; /* [width] of its position, the sign of the turn folded into sin; NULL: no turn */
    int capacity, slot;
    int lead;             /* keys of the probe prefix, [layers, shared, lead, width], float32 */
    const float *lead_keys, *lead_values;
} Row;

/* What each row sees: entry (row * heads + head) with `heads` 1 (all alike) or one a key/value head. */
typedef struct {
    const int *prefix, *start, *extra;
    int heads;
} Sight;

/* What one row sees in one key/value head: slots 0..prefix-1, then `count` slots more. */
typedef struct {
    const int *extra;
    int prefix, count;
} Sees;

/* ---- pool.c: run a job on n threads; the caller is thread 0. A job meets at barriers and takes numbers from a counter. */
typedef struct Team Team;
typedef void (*Job)(void *what, Team *team, int thread);
void team_run(int threads, Job job, void *what);
void team_barrier(Team *team);
int team_take(Team *team, int counter, int step); /* the next `step` numbers of one of 4 counters: the first of them */
void team_reset(Team *team, int counter);         /* by one thread, where no other takes from it */
int team_size(const Team *team);

/* ---- kernels.c: one for each kind of processor. Blocks first..last-1 of y = x W' [+ y] + bias for rows of x, [rows, ldx]. */
typedef struct {
    const char *name;
    void (*product)(const Matrix *w, int first, int last, const float *x, int ldx, int rows, float *y, int ldy, int add);
    /* The same for a bfloat16 matrix and rows rounded to bfloat16; both NULL where the processor cannot multiply these. */
    void (*product_rounded)(const Matrix *w, int first, int last, const uint16_t *x, int ldx, int rows, float *y, int ldy,
                            int add);
    void (*round)(const float *x, int n, uint16_t *to);
    /* The same for a quantised matrix and at most `few` rows, which are rounded where product_rounded is not NULL. */
    void (*product_few)(const Matrix *w, int first, int last, const void *x, int ldx, int rows, float *y, int ldy, int add);
    int few;
    void (*unpack)(const Matrix *w, int block, uint16_t *to); /* a block of a quantised matrix as bfloat16, [in / 2][16][2] */
    /* Rows of one text; q is [rows, ldq], out [rows, heads * width], both at the first head that shares this one. */
    void (*attend)(const Stack *s, const Row *row, const Sees *sees, int rows, int layer, int head, const float *q, size_t ldq,
                   float *out, float *scores, size_t room);
    void (*activate)(float *h, const float *up, int n, int silu); /* h = f(h) [* up] */
    void (*norm)(const Stack *s, const Norm *norm, const float *x, float *y);
    /* Turn and keep what stands at from..upto-1 of a row's queries, keys and values. */
    void (*place)(const Stack *s, const Row *row, int layer, float *qkv, int from, int upto);
} Kernel;
enum { FEW = 8 }; /* the most of any kernel */
const Kernel *kernel_named(const char *name); /* NULL: not on this processor */
int kernel_sound(const Kernel *kernel);       /* whether it computes what the portable one does */

/* ---- layers.c: y = x W' + b for rows (the head, and `linear` alone); sublayers first..last-1 over rows x [rows, d] */
typedef struct {
    const Kernel *kernel;
    int threads;
} How;
int compute_product(How how, const Matrix *w, const float *x, int rows, float *y);
/* mute: the rows leave keys and values in every layer and keep their state. 0, or -1: out of memory. */
int compute_layers(How how, const Stack *s, int first, int last, const Row *row, int rows, Sight sight, int mute, float *x);
int compute_head(How how, const Stack *s, const float *x, int rows, float *normed, float *logits);

static inline float widen(uint16_t h) {
    union {
        uint32_t i;
        float f;
    } u = {(uint32_t)h << 16};
    return u.f;
}

/* What a float16 stands for. */
static inline float from_float16(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    union {
        uint32_t i;
        float f;
    } u = {sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13};
    if (exponent) return u.f;
    return sign ? -(float)fraction / 16777216.0f : (float)fraction / 16777216.0f;
}

/* To the nearest bfloat16, ties to even; a NaN stays one. */
static inline uint16_t narrow(float f) {
    union {
        float f;
        uint32_t i;
    } u = {f};
    if ((u.i & 0x7fffffff) > 0x7f800000) return (uint16_t)((u.i >> 16) | 64);
    return (uint16_t)((u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16);
}

#endif
